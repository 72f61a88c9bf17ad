# SPDX-License-Identifier: Apache-2.0
"""Weights of timm's models, and of keymix's, into a model with mixers: whatever stays the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from keymix.errors import UserError, one_line
from keymix.hosts.base import Host, encoder_of, find_host, find_mixers
from keymix.hosts.windows import resized_table
from keymix.layers.folding import refuse_folded
from keymix.mixers.base import Grid
from keymix.models.preprocessing import describe_loaded
from keymix.models.weight_grids import (
    Geometry,
    adapted_mixer,
    geometry_at,
    pointwise,
    windowed,
)
from keymix.models.weight_source import Source, read_source, unwrapped

State = Mapping[str, Tensor]
_TABLE = "relative_position_bias_table"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What became of a checkpoint.

    Attributes:
        copied: Names of the model's tensors that were taken over as they are (1x1 convolutions
            and linear maps in each other's shape).
        resized: Those that were resampled from another grid.
        missing: Those that the checkpoint did not give; they are as they were.
        unused: Names of the checkpoint's tensors that went nowhere.
    """

    copied: tuple[str, ...]
    resized: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def load_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    img_size: int | Grid | None = None,
) -> Loaded:
    """Load what fits of a checkpoint into a model.

    Names of a host's attention become those of the mixer that stands there
    (``blocks.0.attn.qkv`` is ``blocks.0.attn.mixer.qkv``). A mixer is taken over only if the
    checkpoint's attention is of its kind: all its projections are there, and nothing is left
    over; so one that loaded without a missing name computes the same. Nor is another layer (an
    MLP, patch embedding or merging) of which something is left over. A classifier of another size
    stays as it is.

    Position embeddings, learned keys and tables of relative positions are resampled to the
    model's grid. A checkpoint holds how many positions there were, not on which grid; that follows
    from the size of the images it was trained on, which a run's weights record and ``img_size``
    gives for others. Where neither does, a grid is taken to be square: as many positions as a
    square model has are copied as they lie, another square number is resampled, and anything else
    (every model that is not square itself and has as many) is refused. Windows are square where
    their table's rows allow it. A position code that follows from the grid and is not in the file
    (``key_value`` with ``pos_dim``) lies where position embeddings do, or else on the model's own.

    Prefixes of wrappers (``module.``, ``_orig_mod.``, Lightning's ``model.``) are left out.

    The model's ``pretrained_cfg`` takes mean, standard deviation, crop and interpolation from a
    run's weights, and the names of its classes with its classifier; the image size stays the
    model's own.

    A model of segmentation takes weights of its kind, or those of a classifier for its encoder:
    all names of the decoder are missing then.

    Args:
        model: Any model; it changes in place, unless an error is raised.
        source: A state dict, a ``.safetensors`` or ``.pth`` file, or a run's folder, of which its
            ``weights_last.safetensors``; of a file that holds a moving average of the weights,
            that.
        img_size: Side, or height and width, of the images that the weights were made at, pixels;
            in place of what a run's weights record.

    Example:
        >>> model = create_model("skaformer_s18")
        >>> timms = timm.create_model("caformer_s18").state_dict()
        >>> load_weights(model, timms).missing[0]
        'stages.1.blocks.0.token_mixer.mixer.key'

    Raises:
        UserError: If the file is damaged or of another kind; nothing of it fits, or it gives less
            than half of the parameters outside mixers and classifier while it holds others; a
            tensor is of another size than the model's of that name, or holds infinities or NaN;
            the grid of its positions is unknown; or keys, or a position code, that
            ``resize="pool_values"`` keeps on their grid are of another. Also if the model is folded
            for inference.
    """
    read, own = read_source(source), model.state_dict()
    named, decoder = _for_encoder(model, unwrapped(read.tensors, own))
    state, called = joined_state(model, named), read.called
    if any(t.is_meta for t in own.values()):
        raise UserError("the model is on the meta device; give it memory with to_empty() first")
    names, idle = target_names(model, state)
    size: int | Grid | None = read.img_size if img_size is None else img_size
    geometry = geometry_at(
        model, _size_of_embeddings(model, names, state) if size is None else size
    )
    classifier = classifier_of(model)
    found: dict[str, Tensor] = {}
    resized: list[str] = []
    mixers = find_mixers(model)
    windows: dict[str, Grid] = {}  # of the checkpoint, by the path of the attention
    try:
        for name in names.keys() & own.keys():
            path, _, leaf = name.rpartition(".")
            if leaf == _TABLE and windowed(model, path):
                window: Any = model.get_submodule(path).window_size
                rows = state[names[name]].shape[0]
                windows[path] = geometry.window(path, rows, (window[0], window[1]))
        for path, mixer in mixers.items():
            given = {name: state[theirs] for name, theirs in _below(names, path).items()}
            window = windows.get(path.removesuffix(".mixer"))
            fitting = adapted_mixer(mixer, given, path, geometry, window)
            for name, (tensor, moved) in fitting.items():
                found[f"{path}.{name}"] = tensor
                resized += [f"{path}.{name}"] if moved else []
        placed = _placed(model, names, state, geometry, windows)
    except UserError as error:
        raise UserError(f"{called}: {error}") from None
    in_mixers = tuple(f"{path}." for path in mixers)
    for name, theirs in names.items():
        if name not in own or name.startswith(in_mixers):
            continue
        wanted = own[name]
        tensor = placed.get(name, pointwise(state[theirs], wanted.shape))
        if name in placed and placed[name] is not state[theirs] and tensor.shape == wanted.shape:
            resized.append(name)
        if tensor.shape == wanted.shape:
            found[name] = tensor
        elif not name.startswith(classifier):
            raise UserError(
                f"{called}: {theirs} is {list(state[theirs].shape)}, and in the model {name} is "
                f"{list(wanted.shape)}; build the model with the sizes of the weights"
            )
    for path in _other_kinds(model, names.keys() - found.keys(), (*in_mixers, *classifier)):
        for name in _below({n: n for n in found}, path).values():
            del found[name]
    resized = [name for name in resized if name in found]
    if not any(not name.startswith(classifier) for name in found):
        theirs, mine = next(iter(state)), next(iter(own), "none")
        raise UserError(
            f"{called}: none of its {len(state)} tensors fits {type(model).__name__}; the first "
            f"is {one_line(theirs)!r}, the model's {mine!r}"
        )
    _check_finite(found, own, names, called)
    took = {names[name] for name in found if name in names} | idle
    left = [name for name in state if name not in took]
    _check_kin(model, found, left, (*in_mixers, *classifier, *decoder), called)
    _take(model, found, read)
    return Loaded(
        copied=tuple(n for n in {**own, **found} if n in found and n not in resized),
        resized=tuple(resized),
        missing=tuple(name for name in own if name not in found),
        unused=tuple(name.removeprefix(encoder_of(model)[1]) if decoder else name for name in left),
    )


def _take(model: nn.Module, found: State, read: Source) -> None:
    """Give a model the tensors, and what is known of the images that they were trained on."""
    model.load_state_dict(found, strict=False)
    if read.shown is not None:
        last = [name for name in model.state_dict() if name.startswith(classifier_of(model))]
        taken = bool(last) and all(name in found for name in last)
        describe_loaded(model, read.shown, with_classes=taken)


def _for_encoder(model: nn.Module, state: State) -> tuple[State, tuple[str, ...]]:
    """Name a classifier's tensors as those of a dense model's encoder.

    Returned are the tensors, unchanged if they are no classifier's, and the paths they leave alone.
    """
    refuse_folded(model, "load_weights")
    _, before = encoder_of(model)
    if not before or any(name.startswith("decoder.") for name in state):
        return state, ()
    others = (f"{name}." for name, _ in model.named_children())
    inside = {f"{before}{name}": tensor for name, tensor in state.items()}
    return inside, tuple(path for path in others if not before.startswith(path))


def _check_finite(found: State, own: State, names: Mapping[str, str], called: str) -> None:
    """Refuse infinities and NaN where the model has none (a mask may have them)."""
    for name, tensor in found.items():
        here = own.get(name)
        infinite_here = here is not None and not bool(here.isfinite().all())
        if not infinite_here and not bool(tensor.isfinite().all()):
            raise UserError(
                f"{called}: {one_line(names.get(name, name))} holds numbers that are not finite; "
                "take weights from before that, such as the best epoch's or an earlier "
                "checkpoint's"
            )


def _check_kin(
    model: nn.Module, found: State, left: list[str], spared: tuple[str, ...], called: str
) -> None:
    """Refuse weights of which some go unused and that give less than half of the model.

    ``found`` is what is taken over, ``left`` are the checkpoint's names that are not. Other weights
    may lack or have what is below the ``spared`` paths: mixers and classifier.
    """
    sizes = {n: p.numel() for n, p in model.named_parameters() if not n.startswith(spared)}
    fits, whole = sum(n for name, n in sizes.items() if name in found), sum(sizes.values())
    odd = next((name for name in left if not name.startswith(spared)), None)
    if odd is not None and 2 * fits < whole:
        raise UserError(
            f"{called} are another model's: they give {fits} of {whole} parameters of "
            f"{type(model).__name__} outside mixers and classifier, and {len(left)} of their "
            f"tensors, such as {one_line(odd)!r}, fit nothing; give weights of this model, or "
            "leave those tensors out"
        )


def _other_kinds(model: nn.Module, left: Iterable[str], spared: tuple[str, ...]) -> set[str]:
    """Paths of layers that a checkpoint has more in than the model: it computes something else.

    A layer is what holds modules without modules of their own, as an MLP or a patch merging. Names
    ``left`` are in the model's words. Below ``spared`` paths other weights may have more.
    """
    modules, found, gone = dict(model.named_modules()), set(), nn.Identity()
    for name in left:
        path = name.rpartition(".")[0]
        while path and isinstance(modules.get(path, gone), nn.Identity):
            path = path.rpartition(".")[0]
        parts = [*modules[path].children()]
        flat = parts and not any([*part.children()] for part in parts)
        if path and flat and not name.startswith(spared):
            found.add(path)
    return found


def _below(names: Mapping[str, str], path: str) -> dict[str, str]:
    """Names under a module's path, without it."""
    return {k.removeprefix(f"{path}."): v for k, v in names.items() if k.startswith(f"{path}.")}


def classifier_of(model: nn.Module) -> tuple[str, ...]:
    """Paths below which the classifier lies."""
    get: Any = getattr(model, "get_classifier", None)
    last = get() if get is not None else None
    lasts = last if isinstance(last, tuple) else (last,)
    return tuple(f"{path}." for path, m in model.named_modules() if path and m in lasts)


def _placed(
    model: nn.Module,
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
    geometry: Geometry,
    windows: Mapping[str, Grid],
) -> dict[str, Tensor]:
    """Position embeddings and tables of relative positions on the model's grids, by its names."""
    own = model.state_dict()
    found: dict[str, Tensor] = {}
    for name in names.keys() & own.keys():
        path, _, leaf = name.rpartition(".")
        tensor = state[names[name]]
        if leaf == "pos_embed":
            try:
                found[name] = _positions(model, tensor, own[name], geometry)
            except UserError as error:
                raise UserError(f"{names[name]} {error}") from None
        elif leaf == _TABLE and path in windows and tensor.shape[1:] == own[name].shape[1:]:
            window: Any = model.get_submodule(path).window_size
            found[name] = resized_table(tensor, windows[path], (window[0], window[1]))
    return found


def _patch_grid(model: nn.Module, tensor: Tensor, wanted: Tensor) -> tuple[Grid, int] | None:
    """Return the model's grid of patches and its prefix; None if position embeddings fit none."""
    patch_embed: Any = getattr(encoder_of(model)[0], "patch_embed", None)
    size = getattr(patch_embed, "grid_size", None)
    if size is None or tensor.ndim != 3 or tensor.shape[2] != wanted.shape[2]:
        return None
    grid: Grid = (size[0], size[1])
    prefix = wanted.shape[1] - math.prod(grid)
    return None if prefix < 0 or tensor.shape[1] <= prefix else (grid, prefix)


def _size_of_embeddings(model: nn.Module, names: Mapping[str, str], state: State) -> Grid | None:
    """Image size of square position embeddings, where a mixer's code lies on their grid unsaid."""
    encoder, before = encoder_of(model)
    wanted: Any = getattr(encoder, "pos_embed", None)
    unsaid = any(mixer.optional_state for mixer in find_mixers(model).values())
    if not unsaid or wanted is None or f"{before}pos_embed" not in names:
        return None
    tensor = state[names[f"{before}pos_embed"]]
    lie = _patch_grid(model, tensor, wanted)
    if lie is None:
        return None
    grid, prefix = lie
    count = tensor.shape[1] - prefix
    side = math.isqrt(count)
    if count == math.prod(grid) or side * side != count:
        return None
    patch: Any = encoder.get_submodule("patch_embed").patch_size
    return side * patch[0], side * patch[1]


def _positions(model: nn.Module, tensor: Tensor, wanted: Tensor, geometry: Geometry) -> Tensor:
    """Resample position embeddings ``[1, P + H W, C]``; as they are where that cannot be."""
    lie = _patch_grid(model, tensor, wanted)
    if lie is None:
        return tensor
    grid, prefix = lie
    old = geometry.resolve(tensor.shape[1] - prefix, grid, geometry.patches())
    if old == grid:
        return tensor
    moved: Tensor = resample_abs_pos_embed(tensor, list(grid), list(old), num_prefix_tokens=prefix)
    return moved


def target_names(model: nn.Module, names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Say what a checkpoint's tensors are called in a model.

    A name that the model has is its own. One below a host's attention becomes that of the mixer
    which is there, in the words of the host. Returned are the model's names, with the checkpoint's
    for each, names of mixers that the model lacks included; and the checkpoint's that do nothing.
    """
    own = model.state_dict().keys()
    hosted = _hosted(model)
    host = _host(model)
    parts = {} if host is None else dict(host.parts)
    found: dict[str, str] = {}
    idle: set[str] = set()
    for name in names:
        place = next((p for p in hosted if name.startswith(p)), None)
        if name in own or place is None or name.startswith(f"{place}mixer."):
            found[name] = name
            continue
        part = name.removeprefix(place)
        renamed = parts.get(part, part)
        if renamed is None:
            idle.add(name)
        else:
            found[f"{place}mixer.{renamed}"] = name
    return found, idle


def joined_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join what a checkpoint's attention holds in pieces, where mixers hold it in one."""
    host = _host(model)
    found = dict(state)
    if host is None:
        return found
    for place in _hosted(model):
        own = {n.removeprefix(place): t for n, t in state.items() if n.startswith(place)}
        joined = host.joined(own)
        for name in own.keys() - joined.keys():
            del found[f"{place}{name}"]
        found |= {f"{place}{name}": t for name, t in joined.items()}
    return found


def _hosted(model: nn.Module) -> list[str]:
    """Paths of what stands where attention stood, with the dot behind."""
    return [path.removesuffix("mixer") for path in find_mixers(model) if path.endswith(".mixer")]


def _host(model: nn.Module) -> Host | None:
    try:
        return find_host(model)
    except UserError:  # no family that hosts mixers: all names are as they are
        return None
