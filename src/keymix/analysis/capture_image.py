# SPDX-License-Identifier: Apache-2.0
"""Attention laid on the image: windows undone, keys at their places."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keymix.analysis.capture import row_chunks
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout


def on_image(
    maps: Float[Tensor, "B h Q M"], layout: Layout
) -> Float[Tensor, "B h Q key_rows key_columns"]:
    """Lay rows of attention out as pictures over the positions of their keys.

    Prefix keys (class token, registers) lie nowhere on the image and are left out: a picture sums
    to what the patches receive, ``maps[..., layout.prefix:].sum(-1)``.

    Args:
        maps: Of :func:`keymix.attention_maps`, of windows with ``windows="image"``.
        layout: Where they lie, ``maps.layouts[path]``.

    Raises:
        UserError: If the maps are of windows, or have other keys than the layout.
    """
    rows, columns = layout.key_grid
    if maps.ndim != 4:
        raise UserError(
            f"maps of shape {tuple(maps.shape)} are of windows; ask for windows='image'"
        )
    if maps.shape[-1] != layout.prefix + rows * columns:
        raise UserError(
            f"maps of {maps.shape[-1]} keys do not fit {layout.prefix} prefix tokens and a grid of "
            f"{rows}x{columns}"
        )
    return maps[..., layout.prefix :].reshape(*maps.shape[:-1], rows, columns)


def window_positions(layout: Layout) -> Int[Tensor, "windows M"]:
    """Return which token of the image each place of each window holds, -1 for padding.

    Args:
        layout: Of a layer with windows.
    """
    assert layout.window is not None
    assert layout.windows is not None
    (height, width), (h, w), (down, across) = layout.grid, layout.window, layout.windows
    tokens = torch.arange(height * width).view(height, width)
    pad = (0, across * w - width, 0, down * h - height)
    shift = (-layout.shift[0], -layout.shift[1])
    if layout.pads_first:
        tokens = F.pad(tokens, pad, value=-1).roll(shift, (0, 1))
    else:
        tokens = F.pad(tokens.roll(shift, (0, 1)), pad, value=-1)
    return tokens.view(down, h, across, w).transpose(1, 2).reshape(down * across, h * w)


class WindowsOnImage:
    """Reads a layer's maps of windows and lays them back on the image.

    Args:
        layout: Of the layer.
        read: Forms the map of some places of every window, ``[B, windows, h, Q, M]``.
    """

    def __init__(self, layout: Layout, read: Callable[[Tensor], Tensor]) -> None:
        self.places = window_positions(layout)
        self.tokens = layout.grid[0] * layout.grid[1]
        self.read = read

    def rows(self, queries: Int[Tensor, " Q"]) -> Float[Tensor, "B h Q N"]:
        """Return the rows of image tokens over all image tokens: zero outside of their window.

        What a query gives to padding is left out, so that a row may sum to less than one.

        Raises:
            UserError: If a query is no token of the image.
        """
        if len(queries) == 0 or int(queries.min()) < 0 or int(queries.max()) >= self.tokens:
            raise UserError(
                f"queries must be indices of the {self.tokens} tokens, got {queries.tolist()}"
            )
        flat = self.places.flatten()
        where = torch.full((self.tokens,), -1)
        where[flat[flat >= 0]] = (flat >= 0).nonzero()[:, 0]
        size = self.places.shape[1]
        window, place = where[queries] // size, where[queries] % size
        asked, which = torch.unique(place, return_inverse=True)
        maps = self._checked(self.read(asked))
        rows = maps[:, window.to(maps.device), :, which.to(maps.device)]  # [Q, B, h, M]
        return self._scattered(rows.permute(1, 2, 0, 3), self.places[window])

    def mean(self) -> Float[Tensor, "B h 1 N"]:
        """Return the mean row over all tokens of the image."""
        total: Tensor | None = None
        for asked, maps in row_chunks(self.places.shape[1], self.read):
            real = (self.places[:, asked] >= 0).to(maps)  # padding asks too, and does not count
            part = torch.einsum("bwhqm,wq->bhwm", self._checked(maps), real)
            total = part if total is None else total + part
        assert total is not None  # a window has a place
        return self._scattered(total.flatten(2)[:, :, None], self.places.flatten()) / self.tokens

    def _checked(self, maps: Tensor) -> Tensor:
        if maps.ndim != 5 or (maps.shape[1], maps.shape[-1]) != tuple(self.places.shape):
            raise UserError(
                f"maps of shape {tuple(maps.shape)} do not fit {self.places.shape[0]} windows of "
                f"{self.places.shape[1]} tokens"
            )
        return maps

    def _scattered(self, rows: Tensor, places: Tensor) -> Tensor:
        """Put rows ``[B, h, Q, K]`` where their keys lie: places ``[K]`` or ``[Q, K]``."""
        there = places.where(places >= 0, self.tokens).to(rows.device).expand(rows.shape)
        laid = rows.new_zeros(*rows.shape[:-1], self.tokens + 1)
        return laid.scatter_(-1, there, rows)[..., :-1]
