# SPDX-License-Identifier: Apache-2.0
"""What stands in a block of timm's Swin: windows as an axis, positions and mask as one bias."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import resize_rel_pos_bias_table, trunc_normal_
from timm.models.swin_transformer import SwinTransformerBlock, get_relative_position_index
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import Place
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.resize import GridBound, counted

MASKED = (
    "its windows are shifted, so that tokens from opposite edges of the image meet in one window, "
    "and this mixer cannot honour the mask that keeps them apart; name another mixer for the "
    "shifted blocks (mixer= takes one a block), or take a model without shifts"
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
    """Return how many windows lie under and beside one another; the last ones are padded."""
    height, width = resolution
    return math.ceil(height / window_size[0]), math.ceil(width / window_size[1])


class HostedWindows(nn.Module):
    """Stands where timm's WindowAttention stood, takes its call, and hands the mixer windows.

    timm folds windows into the batch; the mixer gets them as an axis, ``[B, nW, N, C]``. The table
    of relative positions stays the host's (timm's name and shape, or one column for all heads);
    it and the shift's mask reach the mixer as one additive bias. Mixers without an attention map
    have no use for a table and get none.

    Args:
        mixer: The mixer, built for tokens of one window.
        place: What the host says about the place.
        table: The host's table of relative positions ``[(2 h - 1) (2 w - 1), heads or 1]``, None
            where an earlier mixer had none.
        one_table: Whether all heads share one column.
        windows: How the windows lie.
        shift: By how many tokens the image is shifted before it is cut into windows.
        shared_keys: Whether learned keys serve all windows.
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
        """Mix the tokens of every window.

        Args:
            x: Windows one after another, image by image, ``[B * nW, N, C]``.
            mask: Added to the logits, ``[nW, N, N]``.
        """
        count = self.window_grid[0] * self.window_grid[1]
        out: Tensor = self.mixer(x.reshape(-1, count, *x.shape[1:]), bias=self.bias(mask))
        return out.flatten(0, 1)


class MixerSwinBlock(SwinTransformerBlock):
    """timm's Swin block with a mixer: its windows are known to the mixer, its mask is exact.

    timm's mask adds -100 to logits across the regions of a shifted window, which leaves e^-100 of
    a weight where logits are alike, and more where they are not. Here it is minus infinity, so
    that nothing crosses whatever the logits. In double precision both give the same output to
    1e-12 as long as logits stay within some 70 of one another.
    """

    attn: HostedWindows
    dynamic_mask: bool

    def get_attn_mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return timm's mask with minus infinity where timm has -100; None without a shift."""
        mask: Tensor | None = super().get_attn_mask(*args, **kwargs)
        return None if mask is None else mask.masked_fill(mask != 0, -torch.inf)

    def _attn(self, x: Tensor) -> Tensor:
        if self.dynamic_mask:  # images of any size: these are the windows of this one
            windows = window_grid((x.shape[1], x.shape[2]), self.window_size)
            self._check_windows(windows)
            self.attn.window_grid = windows
        out: Tensor = super()._attn(x)
        return out

    def _check_windows(self, windows: Grid) -> None:
        """Refuse an image whose windows are not those that have keys of their own."""
        mixer = self.attn.mixer
        if not isinstance(mixer, GridBound) or not mixer.own_windows:
            return
        site = mixer.site
        if windows != site.window_grid:
            raise UserError(
                f"mixer {mixer.mixer_name!r} {mixer.holds} in each of "
                f"{counted(site.windows, site.window_grid)}, and this image has "
                f"{counted(math.prod(windows), windows)}; keys that all windows share serve any "
                "image (build with shared_keys=True), and one other size is taken for good by "
                "keymix.models.set_image_size(model, (height, width), resize='interpolate')"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens ``[B, H, W, C]`` of windows, then transform each, as timm's block."""
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        tokens = x.flatten(1, 2)  # timm's way of it cannot take a batch of no images
        out: Tensor = tokens + self.drop_path2(self.mlp(self.norm2(tokens)))
        return out.reshape(x.shape)

    def refuses_input_size(
        self, feat_size: Grid, window_size: Grid, always_partition: bool | None = None
    ) -> str | None:
        """Say why the mixer cannot take another resolution or window, None if it can."""
        there = copy.copy(self)  # its sizes alone are changed
        there.input_resolution = feat_size
        if always_partition is not None:
            there.always_partition = always_partition
        window, shift = there._calc_window_shift(window_size)
        mixer = self.attn.mixer
        if any(shift) and not mixer.claims.maskable:
            return f"mixer {mixer.mixer_name!r} cannot stay: {MASKED}"
        windows = None if self.attn.shared_keys else window_grid(feat_size, window)
        reason = mixer.refuses_grid(window, window_grid=windows)
        if not isinstance(mixer, GridBound) or not mixer.bound or mixer.resize == "interpolate":
            return reason
        if reason is None and mixer.keys_grid(window) == window:
            return None
        return self._remedy(mixer, window, window_grid(feat_size, window))

    def _remedy(self, mixer: GridBound, window: Grid, windows: Grid) -> str:
        """Say what serves other windows where keys are not resampled to them."""
        keep = f"set_input_size(…, window_size={self.window_size})"
        here, there = ("{}x{} tokens".format(*size) for size in (self.window_size, window))
        before, after = f"windows of {here}", f"windows of {there}"
        why = "relative positions and masks are of as many keys as tokens in a window"
        remedy = f"or let windows keep their size: {keep}"
        if mixer.own_windows:
            before = f"{counted(mixer.site.windows, mixer.site.window_grid)} of {here}"
            after = f"{counted(math.prod(windows), windows)} of {there}"
            why = why if here != there else "each window has keys of its own"
            remedy = (
                "without it only keys that all windows share serve (build with shared_keys=True, "
                f"train with --model.options.shared_keys true), in windows that keep their size: "
                f"{keep}"
            )
        return (
            f"mixer {mixer.mixer_name!r} {mixer.holds} for {before}, and this size has {after}, "
            f"which only resize='interpolate' serves (a model: mixer_options={{'resize': "
            f"'interpolate'}}), since {why}; {remedy}"
        )

    def set_input_size(
        self, feat_size: Grid, window_size: Grid, always_partition: bool | None = None
    ) -> None:
        """Take another resolution and window size, as timm's block does, with the mixer.

        Raises:
            UserError: If the mixer cannot take it; the block has not changed then.
        """
        reason = self.refuses_input_size(feat_size, window_size, always_partition)
        if reason is not None:
            raise UserError(reason)
        super().set_input_size(feat_size, window_size, always_partition)
        windows = window_grid(feat_size, self.window_size)
        self.attn.window_grid, self.attn.shift = windows, self.shift_size
        self.attn.mixer.set_grid(
            self.window_size, window_grid=None if self.attn.shared_keys else windows
        )
