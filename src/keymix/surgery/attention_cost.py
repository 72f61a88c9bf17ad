# SPDX-License-Identifier: Apache-2.0
"""What the attention of each layer costs: parameters, multiply-adds, time of it alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from keymix.analysis.capture import inference_mode_of
from keymix.analysis.counting import Count, count
from keymix.analysis.measure import timed
from keymix.analysis.timing import Turns, quartiles
from keymix.errors import UserError
from keymix.hosts.layers import Layer
from keymix.surgery.images import run
from keymix.surgery.search_record import Attention, Cost

ROUNDS = 20
"""Of timing, behind each median."""

Times = tuple[float | None, float | None, float | None]  # quartiles, the median between


def attention_costs(
    model: nn.Module, found: Sequence[Layer], cost: Cost, image: Tensor
) -> tuple[Attention, ...]:
    """Measure what the attention of every layer costs, and its share of what all cost.

    Args:
        model: The model.
        found: All of its layers.
        cost: What the shares are shares of.
        image: One image ``[1, C, H, W]``; its size decides multiply-adds and latency.

    Raises:
        UserError: If all cost nothing.
    """
    counted = count(model, tuple(image.shape[1:]))
    params = [sum(p.numel() for p in layer.module.parameters()) for layer in found]
    macs = [_macs(counted, layer.path) for layer in found]
    nothing: Times = (None, None, None)
    times = _times(model, found, image) if cost == "latency" else [nothing] * len(found)
    medians = [median for _, median, _ in times]
    costs = dict(zip(get_args(Cost), (params, macs, medians), strict=True))[cost]
    total = math.fsum(each or 0.0 for each in costs)
    if total == 0:
        raise UserError(f"the layers of this model have no {cost}: count another cost")
    return tuple(
        Attention(
            path=layer.place.path,
            params=params[i],
            macs=macs[i],
            latency_q1_ms=times[i][0],
            latency_ms=times[i][1],
            latency_q3_ms=times[i][2],
            share=(costs[i] or 0.0) / total,
        )
        for i, layer in enumerate(found)
    )


def _macs(counted: Count, path: str) -> int:
    inside = f"{path}."
    return sum(
        layer.macs
        for layer in counted.layers
        if layer.path == path or layer.path.startswith(inside)
    )


def _times(model: nn.Module, found: Sequence[Layer], image: Tensor) -> list[Times]:
    """Quartiles of the time of each layer's attention alone, milliseconds, all in turns."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def listener(path: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[path] = (args, kwargs)

        return note

    anchor = next(model.parameters())
    handles = [
        layer.module.register_forward_pre_hook(listener(layer.path), with_kwargs=True)
        for layer in found
    ]
    try:
        with inference_mode_of(model), torch.no_grad():
            run(model, image.to(anchor.device, anchor.dtype))
    finally:
        for handle in handles:
            handle.remove()
    with inference_mode_of(model), torch.no_grad():
        passes = {}
        for layer in found:
            args, kwargs = calls[layer.path]
            call = functools.partial(layer.module, *args, **kwargs)
            passes[layer.path] = timed(call, anchor.device)
        turns = Turns(passes)
        for _ in range(ROUNDS):
            turns.round()
    kept = [turns.samples[layer.path].kept() for layer in found]
    return [quartiles([1e3 * each for each in seconds]) for seconds in kept]
