# SPDX-License-Identifier: Apache-2.0
"""How torchvision's Swin cuts a feature map into shifted windows, and what stands in its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from keymix.errors import UserError
from keymix.hosts.windows import MASKED, HostedWindows, window_grid
from keymix.mixers.base import Grid
from keymix.mixers.resize import GridBound, counted


@dataclass(frozen=True)
class Cut:
    """One way of cutting a feature map into windows.

    The map is padded with zeros at the right and the bottom until windows fill it, rolled up and
    left by the shift, and cut, as torchvision's ``shifted_window_attention`` does.

    Attributes:
        grid: The feature map (H, W).
        window: A window, tokens.
        shift: What the map is rolled by; nought on an axis that one window covers.
    """

    grid: Grid
    window: Grid
    shift: Grid

    @classmethod
    def of(cls, grid: Grid, window: Grid, shift: Grid) -> Cut:
        """Return the cut of a map, its shift cancelled where one window covers the map.

        Args:
            grid: The feature map.
            window: A window.
            shift: What a block would shift by.
        """
        down, across = (
            0 if side <= width else by for side, width, by in zip(grid, window, shift, strict=True)
        )
        return cls(grid, window, (down, across))

    @property
    def windows(self) -> Grid:
        """Windows under and beside one another."""
        return window_grid(self.grid, self.window)

    @property
    def padded(self) -> Grid:
        """The map's size after padding."""
        rows, columns = self.windows
        return rows * self.window[0], columns * self.window[1]

    def apart(self, x: Tensor) -> Tensor:
        """Cut a map ``[B, H, W, C]`` into windows ``[B, windows, N, C]``."""
        down, across = (p - s for p, s in zip(self.padded, self.grid, strict=True))
        x = pad(x, (0, 0, 0, across, 0, down))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        (rows, columns), (high, wide) = self.windows, self.window
        x = x.reshape(x.shape[0], rows, high, columns, wide, x.shape[-1])
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def together(self, y: Tensor) -> Tensor:
        """Lay windows ``[B, windows, N, C]`` back to a map ``[B, H, W, C]``."""
        y = y.reshape(y.shape[0], *self.windows, *self.window, y.shape[-1])
        y = y.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            y = y.roll(self.shift, (1, 2))
        return y[:, : self.grid[0], : self.grid[1]]

    def mask(self, like: Tensor, value: float = -torch.inf) -> Tensor | None:
        """Return what is added between tokens from opposite edges, ``[windows, N, N]``.

        Args:
            like: Whose device and dtype it has.
            value: What is added; torchvision's own is -100.

        Returns:
            None where nothing is shifted.
        """
        if not any(self.shift):
            return None
        regions = like.new_zeros(1, *self.padded, 1)
        for axis, (side, width, by) in enumerate(
            zip(self.padded, self.window, self.shift, strict=True)
        ):
            if by:  # on an axis without a shift all lies as it did
                place = torch.arange(side, device=like.device)
                region = (place >= side - width).to(like) + (place >= side - by).to(like)
                shape = (1, side, 1, 1) if axis == 0 else (1, 1, side, 1)
                regions = regions + region.reshape(shape) * 3**axis
        marks = Cut(self.padded, self.window, (0, 0)).apart(regions)[0, :, :, 0]
        across = marks[:, :, None] != marks[:, None, :]
        return like.new_zeros(across.shape).masked_fill(across, value)


class HostedShiftedWindows(HostedWindows):
    """Stands where torchvision's ShiftedWindowAttention stood, and takes its feature map.

    Shift, padding and windows are torchvision's; tokens of padding are mixed like others, as they
    are there. The mask is minus infinity where torchvision adds -100, so that nothing crosses the
    edges whatever the logits. Images may be of any size, as long as no key is bound to a window.

    Arguments are those of :class:`keymix.hosts.windows.HostedWindows`; ``shift`` is the block's.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # a map, as torchvision calls
        """Mix the tokens of every window of a map ``[B, H, W, C]``.

        Raises:
            UserError: If each window has keys of its own and these are others, or the map is
                shifted and the mixer cannot honour the mask.
        """
        cut = Cut.of((x.shape[1], x.shape[2]), self.window_size, self.shift)
        self._check(cut)
        self.window_grid = cut.windows
        out: Tensor = self.mixer(cut.apart(x), bias=self.bias(cut.mask(x)))
        return cut.together(out).contiguous()

    def _check(self, cut: Cut) -> None:
        mixer, windows = self.mixer, cut.windows
        if any(cut.shift) and not mixer.claims.maskable:
            raise UserError(f"mixer {mixer.mixer_name!r} cannot serve an image so large: {MASKED}")
        if not isinstance(mixer, GridBound) or not mixer.own_windows:
            return
        site, remedy = mixer.site, "before mixers are put"
        if mixer.resize == "interpolate":
            remedy = "and then keymix.hosts.find_host(model).tell(model)"
        if windows != site.window_grid:
            raise UserError(
                f"mixer {mixer.mixer_name!r} {mixer.holds} in each of "
                f"{counted(site.windows, site.window_grid)}, and this image has "
                f"{counted(math.prod(windows), windows)}; keys that all windows share serve any "
                "image (put_mixers(…, host=TorchvisionSwin(shared_keys=True))), and those a window "
                f"one size, which is said as model.image_size = (height, width) {remedy}"
            )
