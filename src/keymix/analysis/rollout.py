# SPDX-License-Identifier: Apache-2.0
"""Attention rollout: how much of each input token reaches a query through all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from keymix.analysis.capture import (
    At,
    Call,
    Layers,
    Seat,
    class_token_of,
    inference_mode_of,
    readout,
    row_chunks,
    run_once,
    select_layers,
)
from keymix.analysis.images import Images, Model, one_batch
from keymix.arguments import checked, module_of, opened
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout

Read = Callable[[Any], Tensor]
"""Forms rows of a layer's map, of queries by their indices; all of None."""
Query = int | At | Literal["cls", "mean"]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What reaches a query from the tokens that entered the first layer.

    Attributes:
        weights: ``[B, N]``, prefix tokens first; a row sums to one.
        layout: Where the tokens lie on the image.
        layers: Paths of the layers that were multiplied, in the model's order.
        query: Whose it is, in words.
    """

    weights: Tensor
    layout: Layout
    layers: tuple[str, ...]
    query: str

    @property
    def picture(self) -> Float[Tensor, "B H W"]:
        """The weights of the patch tokens at their places; prefix tokens are left out."""
        grid = self.layout.grid
        return self.weights[:, self.layout.prefix :].reshape(-1, *grid)


@checked
def attention_rollout(
    model: Model, images: Images, *, layers: Layers | None = None, query: Query | None = None
) -> Rollout:
    r"""Compute attention rollout for one query.

    :math:`\tilde A = \bar A_L \cdots \bar A_1` with :math:`\bar A_l` the rows of
    :math:`\tfrac12 \mathrm{mean}_h A_{l,h} + \tfrac12 I`, each divided by its sum: attention
    weights as flows, half of which pass by a layer on its residual path.
    Paper: Quantifying Attention Flow in Transformers, https://arxiv.org/abs/2005.00928, Sec. 3,
    Eq. 1. The maps are those right after the activation (``stage="softmax"``).

    Only the row of the query is carried back, from the last layer to the first, so no N x N
    product is formed: what is kept are the tokens ``[B, N, C]`` that entered each layer, and one
    layer's map at a time, in chunks of rows. Of maps that are there already,
    ``maps.rollout()`` computes the same.

    Args:
        model: As :func:`keymix.attention_maps` takes it.
        images: As :func:`keymix.attention_maps` takes them.
        layers: Which layers, as :func:`keymix.attention_maps` takes them; all if None. All must
            see the same tokens: of a model in stages choose one stage.
        query: Index of a token, ``"cls"``, ``"mean"`` (the mean over patch tokens), or a place on
            the image; None for the class token where one passes through the layers and is read
            out, else the mean.

    Raises:
        NoAttentionMap: If a layer forms no map.
        UserError: If an argument is none of these, the layers' tokens differ (stages, windows,
            keys on another grid), or a map has negative entries.
    """
    trained = opened(model)
    network, batch = module_of(trained), one_batch(images, trained)
    layouts: dict[str, Layout | None] = {}
    reads: dict[str, Read] = {}

    def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
        layouts[seat.path] = layout
        reads[seat.path] = partial(seat.map, call, stage="softmax")

    run_once(network, batch, select_layers(network, layers), on_call)
    asked = readout(network, layouts.values()) if query is None else query
    with torch.no_grad(), inference_mode_of(network):
        return rolled(layouts, reads, asked)


def rolled(layouts: dict[str, Layout | None], reads: dict[str, Read], query: Query) -> Rollout:
    """Carry the row of a query back through layers; `reads`, used up, form some rows of a map."""
    paths = tuple(layouts)
    layout = _same_tokens(layouts)
    row = _start(layout, query, paths[0])
    while reads:  # what the last layer needs is let go
        row = _back(*reads.popitem(), row)
    return Rollout(weights=row, layout=layout, layers=paths, query=str(query))


def _same_tokens(layouts: dict[str, Layout | None]) -> Layout:
    """Return where the tokens of all layers lie; refuse maps that are no squares over them."""
    why, (start, first) = "", next(iter(layouts.items()))
    for path, layout in layouts.items():
        if layout is None or first is None:
            raise UserError(f"it is unknown where the tokens of layer {path} lie on the image")
        if layout.window is not None and layout.window != layout.grid:
            why = f"attention of {path} stays inside windows, so its maps are no maps of the image"
        elif layout.key_grid != layout.grid:
            why = f"keys of {path} lie on another grid than its tokens"
        elif _tokens(layout) != _tokens(first):
            why = (
                f"the tokens of {start} and {path} differ ({_tokens(first)}; {_tokens(layout)}), "
                "choose layers= of one stage"
            )
        if why:
            raise UserError(f"rollout multiplies maps over the same tokens: {why}")
    assert first is not None  # else it was refused
    return first


def _tokens(layout: Layout) -> str:
    prefix = f"{layout.prefix} and " if layout.prefix else ""
    return f"{prefix}{layout.grid[0]}x{layout.grid[1]}"


def _start(layout: Layout, query: Query, path: str) -> Tensor:
    """The row of the identity that belongs to the query, ``[N]``."""
    count = layout.prefix + layout.grid[0] * layout.grid[1]
    row = torch.zeros(count, dtype=torch.float64)
    if query == "mean":
        row[layout.prefix :] = 1 / (count - layout.prefix)
        return row
    if query == "cls":
        query = class_token_of(layout, path)
    if isinstance(query, At):
        query = query.token(layout)
    if not isinstance(query, int) or not 0 <= query < count:
        raise UserError(f"{query=} must be 'cls', 'mean', a place or an index of {count} tokens")
    row[query] = 1
    return row


def _back(path: str, read: Read, row: Tensor) -> Tensor:
    """Multiply a row ``[N]`` or ``[B, N]`` from the right by a layer's normalised map."""
    out: Tensor | None = None
    count = row.shape[-1]
    for rows, found in row_chunks(count, read):
        # the one window that is the image stands for the image
        maps = found[:, 0] if found.ndim == 5 else found
        a = maps.double().mean(-3) / 2  # [B, rows, N]
        if bool((a < 0).any()):
            raise UserError(
                f"the map of layer {path} has negative entries, which are no shares that "
                "rollout could multiply"
            )
        there = row.to(a.device).expand(a.shape[0], -1)
        part = there[:, rows] / (a.sum(-1) + 0.5)
        out = torch.zeros_like(there) if out is None else out
        out = out + (part[:, None] @ a)[:, 0]
        out[:, rows] += part / 2
    assert out is not None  # a layer has tokens
    return out
