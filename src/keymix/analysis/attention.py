# SPDX-License-Identifier: Apache-2.0
"""The attention maps of a model: one forward pass, then only the rows that were asked for."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import NoAttentionMap, UserError, unknown
from keymix.hosts.base import find_mixers
from keymix.mixers.base import Queries, Stage, TokenMixer

Layers = str | int | Sequence[str | int]


def select_mixers(model: nn.Module, layers: Layers | None = None) -> dict[str, TokenMixer]:
    """Choose mixers of a model by place.

    Args:
        model: A model that hosts keymix mixers.
        layers: Patterns of module paths such as ``"blocks.3.*"``, or numbers of the mixers in the
            model's order (negative ones count from the end); all if None.

    Returns:
        Path to mixer, in the model's order.

    Raises:
        UserError: If the model has no mixers, or a layer matches none.
    """
    mixers = find_mixers(model)
    if not mixers:
        raise UserError(
            f"{type(model).__name__} hosts no keymix mixer, so there are no maps to read; make it "
            "with keymix.create_model(name, mixer=...)"
        )
    if layers is None:
        return mixers
    paths = list(mixers)
    wanted: set[str] = set()
    for layer in [layers] if isinstance(layers, (str, int)) else layers:
        if isinstance(layer, int):
            if not -len(paths) <= layer < len(paths):
                raise UserError(f"layer {layer} is out of range: the model has {len(paths)} mixers")
            wanted.add(paths[layer])
            continue
        matched = fnmatch.filter(paths, layer)
        if not matched:
            raise unknown("layer", layer, paths)
        wanted.update(matched)
    if not wanted:
        raise UserError(f"{layers=} chooses no layer; leave it out for all {len(paths)}")
    return {path: mixer for path, mixer in mixers.items() if path in wanted}


@contextlib.contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Put every module into inference mode for a while; each gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def read_map(
    mixer: TokenMixer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    queries: Queries | None = None,
    stage: Stage = "softmax",
) -> Float[Tensor, "*batch h Q M"]:
    """Return the map of a forward pass, from the arguments that the mixer was called with.

    Args:
        mixer: The mixer.
        args: Positional arguments of the call: tokens, grid, bias.
        kwargs: The others, such as the map that a mixer shares with another.
        queries: Indices of the query tokens wanted; all if None.
        stage: As :func:`attention_maps` takes it.
    """
    named = dict(zip(("x", "grid", "bias"), args, strict=False)) | dict(kwargs)
    return mixer.attention_map(**named, queries=queries, stage=stage)


def attention_maps(
    model: nn.Module,
    images: Float[Tensor, "B C H W"],
    *,
    layers: Layers | None = None,
    queries: Queries | None = None,
    stage: Stage = "softmax",
) -> dict[str, Float[Tensor, "*batch h Q M"]]:
    """Read the attention maps of some layers for a batch of images.

    The images go through the model once, in inference mode and without gradients, with fused
    attention where the model uses it; each chosen mixer then forms only the rows asked for from
    the tokens it was given. The model is left as it was.

    Args:
        model: A model that hosts keymix mixers.
        images: A batch as the model takes it, normalised.
        layers: Which mixers: patterns of module paths (``"blocks.3.*"``) or numbers in the
            model's order (-1 is the last); all if None.
        queries: Indices of the query tokens, prefix tokens first; all if None. One row of a
            ViT at 224 px is 197 numbers a head, the whole map 197 times as many.
        stage: ``"softmax"`` for the weights right after the activation (entropy, rollout), or
            ``"final"`` for the map that multiplies V, after any mixing of heads.

    Returns:
        Module path to map, ``[B, h, Q, M]`` (``[B, windows, h, Q, M]`` inside windows), in the
        model's order.

    Example:
        >>> model = keymix.create_model("vit_micro_p4_32", mixer="static_key")
        >>> maps = keymix.attention_maps(model, torch.randn(2, 3, 32, 32), layers=-1, queries=[0])
        >>> [m.shape for m in maps.values()]
        [torch.Size([2, 4, 1, 65])]

    Raises:
        NoAttentionMap: If a chosen layer forms no map; it names the layer and the reason.
        UserError: If no layer matches, or a query is no token.
    """
    chosen = select_mixers(model, layers)
    maps: dict[str, Tensor] = {}

    def reader(path: str) -> Any:
        def read(mixer: TokenMixer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path in maps:
                raise UserError(f"layer {path} runs more than once in a forward pass; leave it out")
            maps[path] = _rows(path, mixer, queries, stage, *args, **kwargs)

        return read

    parameter = next(model.parameters(), None)
    if parameter is not None:
        images = images.to(device=parameter.device, dtype=parameter.dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(inference_mode_of(model))
        for path, mixer in chosen.items():
            handle = mixer.register_forward_pre_hook(reader(path), with_kwargs=True)
            stack.callback(handle.remove)
        getattr(model, "_orig_mod", model)(images)
    idle = [path for path in chosen if path not in maps]
    if idle:
        raise NoAttentionMap(f"layer {idle[0]} did not run in the forward pass, so it has no map")
    return {path: maps[path] for path in chosen}


def _rows(
    path: str,
    mixer: TokenMixer,
    queries: Queries | None,
    stage: Stage,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    try:
        return read_map(mixer, args, kwargs, queries, stage).detach()
    except NoAttentionMap as error:
        raise NoAttentionMap(f"layer {path}: {error}; choose other layers with layers=") from error
