# SPDX-License-Identifier: Apache-2.0
"""The grid of a call in models whose patches one plain convolution cuts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.call_grid import CallGrid
from keymix.layers.patches import whole_size
from keymix.mixers.base import Grid


class ConvGrid(CallGrid):
    """The grid of a model's present or last call, seen at the convolution that cuts patches."""

    def __init__(self) -> None:
        super().__init__()
        self.varies = True

    def see(self, conv: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        """Take the grid of what a convolution returned, ``[B, C, H, W]``."""
        self.grid = (out.shape[-2], out.shape[-1])


def watched(conv: nn.Module) -> ConvGrid | None:
    """Return what watches a convolution, None if nothing does."""
    for hook in conv._forward_hooks.values():
        watching = getattr(hook, "__self__", None)
        if isinstance(watching, ConvGrid):
            return watching
    return None


def watch(conv: nn.Module) -> ConvGrid:
    """Return what watches a convolution, from now on if nothing did."""
    call = watched(conv)
    if call is None:
        call = ConvGrid()
        conv.register_forward_hook(call.see)
    return call


def patches_of(conv: nn.Conv2d, image: Grid) -> Grid:
    """Return the grid of patches that a convolution cuts an image into.

    Args:
        conv: The convolution.
        image: Height and width, pixels.

    Raises:
        UserError: If the image is smaller than a patch.
    """
    padding = conv.padding if isinstance(conv.padding, tuple) else (0, 0)
    down, across = (
        (side + 2 * pad - kernel) // stride + 1
        for side, pad, kernel, stride in zip(
            image, padding, conv.kernel_size, conv.stride, strict=True
        )
    )
    if down < 1 or across < 1:
        raise UserError(
            f"images of {image[0]}x{image[1]} pixels are smaller than a patch of "
            f"{conv.kernel_size[0]}x{conv.kernel_size[1]}"
        )
    return down, across


def said_size(model: nn.Module) -> Grid | None:
    """Return the image size that a user gave a model as its attribute ``image_size``, in pixels.

    Raises:
        UserError: If it is no size.
    """
    said = getattr(model, "image_size", None)
    return None if said is None else whole_size("image_size", said)
