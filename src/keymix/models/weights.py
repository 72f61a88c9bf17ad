# SPDX-License-Identifier: Apache-2.0
"""Weights of timm's models, and of keymix's, into a model with mixers: whatever stays the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from keymix.errors import UserError, one_line
from keymix.hosts.base import find_mixers
from keymix.mixers.base import Grid
from keymix.models.weight_grids import Geometry, geometry_at, resized_table, windowed
from keymix.models.weight_names import target_names
from keymix.models.weight_shapes import adapted_mixer, pointwise
from keymix.models.weight_source import read_source

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
    over; so one that loaded without a missing name computes the same. A classifier of another
    size stays as it is.

    Position embeddings, learned keys and tables of relative positions are resampled to the
    model's grid. A checkpoint holds how many positions there were, not how they lay; that follows
    from the size of the images it was trained on, which a run's weights tell and ``img_size``
    gives for others. Where neither does, a grid is taken to be square: as many positions as a
    square model has are copied as they lie, another square number is resampled, and anything else
    (every model that is not square itself and has as many) is refused. Windows are square where
    their table's rows allow it.

    Args:
        model: Any model; it changes in place, unless an error is raised.
        source: A state dict, a ``.safetensors`` or ``.pth`` file, or a run's folder, of which its
            ``weights_last.safetensors``; of a file that holds a moving average of the weights,
            that.
        img_size: Side, or height and width, of the images that the weights were made at, pixels;
            in place of what a run's weights tell.

    Example:
        >>> model = create_model("skaformer_s18")
        >>> timms = timm.create_model("caformer_s18").state_dict()
        >>> load_weights(model, timms).missing[0]
        'stages.1.blocks.0.token_mixer.mixer.key'

    Raises:
        UserError: If the file is damaged or of another kind; nothing of it fits, or it gives less
            than half of the parameters outside mixers and classifier while it holds others; a
            tensor is of another size than the model's of that name, or holds infinities or NaN;
            nothing tells the grid of its positions; or keys that ``resize="pool_values"`` keeps on
            their grid are of another.
    """
    read = read_source(source)
    state, called = read.tensors, read.called
    own = model.state_dict()
    if any(t.is_meta for t in own.values()):
        raise UserError("the model is on the meta device; give it memory with to_empty() first")
    geometry = geometry_at(model, read.img_size if img_size is None else img_size)
    names, idle = target_names(model, state)
    classifier = _classifier(model)
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
    if not any(not name.startswith(classifier) for name in found):
        theirs, mine = next(iter(state)), next(iter(own), "none")
        raise UserError(
            f"{called}: none of its {len(state)} tensors fits {type(model).__name__}; the first "
            f"is {one_line(theirs)!r}, the model's {mine!r}"
        )
    _check_finite(found, own, names, called)
    took = {names[name] for name in found} | idle
    left = [name for name in state if name not in took]
    _check_kin(model, found, left, (*in_mixers, *classifier), called)
    model.load_state_dict(found, strict=False)
    return Loaded(
        copied=tuple(n for n in {**own, **found} if n in found and n not in resized),
        resized=tuple(resized),
        missing=tuple(name for name in own if name not in found),
        unused=tuple(left),
    )


def _check_finite(found: State, own: State, names: Mapping[str, str], called: str) -> None:
    """Refuse infinities and NaN where the model has none (a mask may have them)."""
    for name, tensor in found.items():
        here = own.get(name)
        infinite_here = here is not None and not bool(here.isfinite().all())
        if not infinite_here and not bool(tensor.isfinite().all()):
            raise UserError(
                f"{called}: {one_line(names[name])} holds numbers that are not finite; take "
                "weights from before that, such as the best epoch's or an earlier checkpoint's"
            )


def _check_kin(
    model: nn.Module, found: State, left: list[str], spared: tuple[str, ...], called: str
) -> None:
    """Refuse weights of which some go unused and that give less than half of the model.

    Args:
        model: The model.
        found: What is taken over.
        left: The checkpoint's names that are not.
        spared: Paths that other weights may lack or have: mixers and classifier.
        called: The checkpoint.
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


def _below(names: Mapping[str, str], path: str) -> dict[str, str]:
    """Names under a module's path, without it."""
    return {k.removeprefix(f"{path}."): v for k, v in names.items() if k.startswith(f"{path}.")}


def _classifier(model: nn.Module) -> tuple[str, ...]:
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


def _positions(model: nn.Module, tensor: Tensor, wanted: Tensor, geometry: Geometry) -> Tensor:
    """Resample position embeddings ``[1, P + H W, C]``; as they are where that cannot be."""
    patch_embed: Any = getattr(model, "patch_embed", None)
    size = getattr(patch_embed, "grid_size", None)
    if size is None or tensor.ndim != 3 or tensor.shape[2] != wanted.shape[2]:
        return tensor
    grid: Grid = (size[0], size[1])
    prefix = wanted.shape[1] - math.prod(grid)
    if prefix < 0 or tensor.shape[1] <= prefix:
        return tensor
    old = geometry.resolve(tensor.shape[1] - prefix, grid, geometry.patches())
    if old == grid:
        return tensor
    moved: Tensor = resample_abs_pos_embed(tensor, list(grid), list(old), num_prefix_tokens=prefix)
    return moved
