# SPDX-License-Identifier: Apache-2.0
"""Windows of timm's and torchvision's Swin: an axis; positions and mask are one bias."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from timm.layers import resize_rel_pos_bias_table, trunc_normal_
from timm.models.swin_transformer import get_relative_position_index
from torch import Tensor, nn

from keymix.hosts.base import Host, Place
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.map_mixer import MapMixer

MASKED = (
    "its windows are shifted, so that tokens from opposite edges of the image meet in one window, "
    "and this mixer cannot honour the mask that keeps them apart; name another mixer for the "
    "shifted blocks (mixer= takes one per block), or take a model without shifts"
)

# what timm's interpolation of a table says of its own workings, and a user can do nothing about
INNER = (
    r"torch\.searchsorted\(\): input value tensor is non-contiguous",
    r"Using a non-tuple sequence for multidimensional indexing is deprecated",
)


@contextmanager
def _without_inner_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in INNER:
            warnings.filterwarnings("ignore", message, UserWarning)
        yield


def window_grid(resolution: Grid, window_size: Grid) -> Grid:
    """Return how many rows and columns of windows there are; the last ones are padded."""
    height, width = resolution
    return math.ceil(height / window_size[0]), math.ceil(width / window_size[1])


class HostedWindows(nn.Module):
    """Stands where timm's WindowAttention stood, takes its call, and hands the mixer windows.

    timm folds windows into the batch; the mixer gets them as an axis, ``[B, nW, N, C]``. The table
    of relative positions ``[(2 h - 1) (2 w - 1), heads or 1]`` stays the host's (timm's name and
    shape, or ``one_table`` column for all heads); it and the shift's mask reach the mixer as one
    additive bias. Mixers without an attention map have no use for a table and get none. ``windows``
    is their grid, ``shift`` the tokens by which the image is shifted before it is cut into them.
    """

    relative_position_bias_table: nn.Parameter | None
    relative_position_index: Tensor

    def __init__(
        self,
        mixer: TokenMixer,
        place: Place,
        *,
        table: nn.Parameter | None,
        one_table: bool,
        windows: Grid,
        shift: Grid,
        shared_keys: bool,
    ) -> None:
        super().__init__()
        assert place.site.grid is not None
        self.mixer = mixer
        self.place = place  # what the host itself says, for the next mixer put here
        self.window_size, self.window_grid, self.shift = place.site.grid, windows, shift
        self.one_table, self.shared_keys = one_table, shared_keys
        self.register_parameter("relative_position_bias_table", None)
        if isinstance(mixer, MapMixer):
            columns = 1 if one_table else mixer.num_heads
            if table is None or table.shape[1] != columns:
                rows = (2 * self.window_size[0] - 1) * (2 * self.window_size[1] - 1)
                table = nn.Parameter(torch.empty(rows, columns, **mixer.factory))
                trunc_normal_(table, std=0.02)
            self.relative_position_bias_table = table
        device = None if table is None else table.device
        index = get_relative_position_index(*self.window_size, device=device)
        self.register_buffer("relative_position_index", index, persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Fill the index after memory was given to a model built on the meta device."""
        device = self.relative_position_index.device
        index = get_relative_position_index(*self.window_size, device=device)
        self.relative_position_index.copy_(index)

    def set_window_size(self, window_size: Grid) -> None:
        """Resample the table for windows of another size, as timm does."""
        if tuple(window_size) == self.window_size:
            return
        before, self.window_size = self.window_size, (window_size[0], window_size[1])
        device = self.relative_position_index.device
        self.relative_position_index = get_relative_position_index(*self.window_size, device=device)
        table = self.relative_position_bias_table
        if table is not None:
            rows = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
            with torch.no_grad(), _without_inner_warnings():
                resized = resize_rel_pos_bias_table(
                    table,
                    new_window_size=self.window_size,
                    new_bias_shape=(rows, table.shape[1]),
                    old_window_size=before,
                )
            trains = table.requires_grad
            self.relative_position_bias_table = nn.Parameter(resized, requires_grad=trains)

    def bias(self, mask: Tensor | None) -> Tensor | None:
        """Return relative positions and mask as one bias, ``[(nW,) heads or 1, N, N]``."""
        table = self.relative_position_bias_table
        if table is None:
            return None if mask is None else mask[:, None]
        positions = table[self.relative_position_index].permute(2, 0, 1)
        return positions if mask is None else positions + mask[:, None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix windows, image by image ``[B * nW, N, C]``; a mask ``[nW, N, N]`` is a bias."""
        count = self.window_grid[0] * self.window_grid[1]
        out: Tensor = self.mixer(x.reshape(-1, count, *x.shape[1:]), bias=self.bias(mask))
        return out.flatten(0, 1)


class SwinHost(Host):
    """What hosts of Swin share: a mixer sees the tokens of one window; windows are an axis.

    The table of relative positions stays with the host. Where windows are shifted the mixer gets a
    mask. ``shared_keys`` says whether learned keys serve all windows of a block, False for keys per
    window, as published; None for what the model has (keys per window at first).
    """

    def __init__(self, *, shared_keys: bool | None = None) -> None:
        self.shared_keys = shared_keys

    def shares(self, attention: nn.Module) -> bool:
        """Whether keys serve all windows of a block that has this attention, or a mixer there."""
        if self.shared_keys is not None:
            return self.shared_keys
        return isinstance(attention, HostedWindows) and attention.shared_keys

    def in_windows(
        self, place: Place, attention: nn.Module, window: Grid, windows: Grid, shift: Grid
    ) -> Place:
        """Return a place with the windows that a block has now, those of tokens in ``window``."""
        own = None if self.shares(attention) else windows
        number = 1 if own is None else own[0] * own[1]
        return replace(
            place,
            site=replace(place.site, grid=window, windows=number, window_grid=own),
            needs_mask=MASKED if any(shift) else None,
        )
