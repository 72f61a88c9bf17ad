# SPDX-License-Identifier: Apache-2.0
"""Attention rollout: how much of each input token reaches a query through all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.analysis.capture import (
    At,
    Call,
    Layers,
    Seat,
    class_token_of,
    inference_mode_of,
    reads_class_token,
    row_chunks,
    run_once,
    select_layers,
)
from keymix.analysis.images import Images, Model, one_batch
from keymix.arguments import checked, module_of, opened
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout


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
    model: Model,
    images: Images,
    *,
    layers: Layers | None = None,
    query: int | At | Literal["cls", "mean"] | None = None,
) -> Rollout:
    r"""Compute attention rollout for one query.

    :math:`\tilde A = \bar A_L \cdots \bar A_1` with :math:`\bar A_l` the rows of
    :math:`\tfrac12 \mathrm{mean}_h A_{l,h} + \tfrac12 I`, each divided by its sum: attention
    weights as flows, half of which pass by a layer on its residual path.
    Paper: Quantifying Attention Flow in Transformers, https://arxiv.org/abs/2005.00928, Sec. 3,
    Eq. 1. The maps are those right after the activation (``stage="softmax"``).

    Only the row of the query is carried back, from the last layer to the first, so no N x N
    product is formed: what is kept are the tokens ``[B, N, C]`` that entered each layer, and one
    layer's map at a time, in chunks of rows.

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
    seats = select_layers(network, layers)
    calls: list[tuple[Seat, Call, Layout]] = []

    def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
        if layout is None:
            raise UserError(f"it is unknown where the tokens of layer {seat.path} lie on the image")
        _refuse(seat.path, layout, calls[0] if calls else None)
        calls.append((seat, call, layout))

    run_once(network, batch, seats, on_call)
    paths, (first, _, layout) = tuple(seats), calls[0]
    if query is None:
        query = "cls" if reads_class_token(network, {first.path: layout}) else "mean"
    row = _start(network, layout, query, first.path)
    weights: Tensor | None = None
    with torch.no_grad(), inference_mode_of(network):
        while calls:
            seat, call, _ = calls.pop()
            weights = _back(seat, call, row if weights is None else weights)
    assert weights is not None  # select_layers chooses at least one
    label = query if isinstance(query, str) else str(query)
    return Rollout(weights=weights, layout=layout, layers=paths, query=label)


def _refuse(path: str, layout: Layout, first: tuple[Seat, Call, Layout] | None) -> None:
    """Refuse a layer whose map is no square over the tokens of all others."""
    why = None
    if layout.window is not None and layout.window != layout.grid:
        why = f"attention of {path} stays inside windows, so its maps are no maps of the image"
    elif layout.key_grid != layout.grid:
        why = f"keys of {path} lie on another grid than its tokens"
    elif first is not None and (layout.grid, layout.prefix) != (first[2].grid, first[2].prefix):
        why = (
            f"the tokens of {first[0].path} and {path} differ ({_tokens(first[2])}; "
            f"{_tokens(layout)}), choose layers= of one stage"
        )
    if why is not None:
        raise UserError(f"rollout multiplies maps over the same tokens: {why}")


def _tokens(layout: Layout) -> str:
    prefix = f"{layout.prefix} and " if layout.prefix else ""
    return f"{prefix}{layout.grid[0]}x{layout.grid[1]}"


def _start(model: nn.Module, layout: Layout, query: int | At | str, path: str) -> Tensor:
    """The row of the identity that belongs to the query, ``[N]``."""
    count = layout.prefix + layout.grid[0] * layout.grid[1]
    row = torch.zeros(count, dtype=torch.float64)
    if query == "mean":
        row[layout.prefix :] = 1 / (count - layout.prefix)
        return row
    if query == "cls":
        query = class_token_of(model, layout, path)
    if isinstance(query, At):
        query = query.token(layout)
    if not isinstance(query, int) or not 0 <= query < count:
        raise UserError(f"{query=} must be 'cls', 'mean', a place or an index of {count} tokens")
    row[query] = 1
    return row


def _back(seat: Seat, call: Call, row: Tensor) -> Tensor:
    """Multiply a row ``[N]`` or ``[B, N]`` from the right by a layer's normalised map."""
    out: Tensor | None = None
    count = row.shape[-1]
    for rows, maps in row_chunks(count, lambda rows: seat.map(call, rows, "softmax")):
        a = _of_image(maps, count, seat.path).double().mean(-3) / 2  # [B, rows, N]
        if bool((a < 0).any()):
            raise UserError(
                f"the map of layer {seat.path} has negative entries, which are no shares that "
                "rollout could multiply"
            )
        there = row.to(a.device).expand(a.shape[0], -1)
        part = there[:, rows] / (a.sum(-1) + 0.5)
        out = torch.zeros_like(there) if out is None else out
        out = out + (part[:, None] @ a)[:, 0]
        out[:, rows] += part / 2
    assert out is not None  # a layer has tokens
    return out


def _of_image(maps: Tensor, count: int, path: str) -> Tensor:
    """Take the one window that is the image for the image."""
    maps = maps[:, 0] if maps.ndim == 5 and maps.shape[1] == 1 else maps
    if maps.ndim != 4 or maps.shape[-1] != count:
        raise UserError(
            f"rollout multiplies maps over the same tokens: the map of {path} has "
            f"{maps.shape[-1]} keys for {count} tokens"
        )
    return maps
