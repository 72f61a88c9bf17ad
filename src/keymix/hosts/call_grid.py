# SPDX-License-Identifier: Apache-2.0
"""The grid of a call, and the size of its images, in models whose blocks get tokens alone."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.layers.checkpoint import recomputing
from keymix.mixers.base import Grid

CALL_SIZE = "_call_size"  # attribute of an attention in windows: the size of its block's last call


class CallGrid:
    """The grid (H, W) of a model's present or last call, from a hook on its patch embedding.

    As many tokens may be on 4x16 or on 16x4, which blocks do not know. The patch embedding and all
    hosted mixers of the model share one of these. ``grid`` is None before the first call.
    """

    def __init__(self) -> None:
        self.grid: Grid | None = None
        self.varies = False  # whether calls may differ

    def attach(self, embed: nn.Module) -> None:
        """Follow the calls of a patch embedding of timm's."""
        if hasattr(embed, "dynamic_feat_size"):
            embed.register_forward_pre_hook(self.record)

    def of(self, x: Tensor, prefix: int) -> Grid | None:
        """Return the grid of tokens ``[*, prefix + N, C]``, None where some were dropped."""
        if self.grid is None or prefix + self.grid[0] * self.grid[1] != x.shape[-2]:
            return None
        return self.grid

    def record(self, embed: Any, args: tuple[Any, ...]) -> None:
        """Take the grid of the images that a patch embedding is called with; fx has none."""
        if not isinstance(args[0], Tensor):
            return
        height, width = args[0].shape[-2:]
        down, across = embed.dynamic_feat_size((height, width))
        self.grid = (down, across)
        self.varies = not getattr(embed, "strict_img_size", True)

    def keep(self, block: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """Return to this call's grid when the backward pass reaches a block's output.

        Under activation checkpointing the block runs again then, perhaps after a call with images
        of another size.
        """
        if not self.varies or torch.compiler.is_compiling() or recomputing():
            return
        if isinstance(out, Tensor) and out.requires_grad:
            there: Any = out
            there.register_hook(partial(self._return_to, self.grid))

    def keep_at(self, block: nn.Module) -> None:
        """Call `keep` after every call of a block, once."""
        if self.keep not in block._forward_hooks.values():
            block.register_forward_hook(self.keep)

    def _return_to(self, grid: Grid | None, gradient: Tensor) -> None:
        self.grid = grid


class ConvGrid(CallGrid):
    """The same, from a hook on the plain convolution that cuts patches."""

    def __init__(self) -> None:
        super().__init__()
        self.varies = True

    def attach(self, embed: nn.Module) -> None:
        """Follow the calls of a convolution."""
        embed.register_forward_hook(self.record_output)

    def record_output(self, conv: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        """Take the grid of what a convolution returned, ``[B, C, H, W]``."""
        if isinstance(out, Tensor):
            self.grid = (out.shape[-2], out.shape[-1])


class CallSize:
    """Height and width of what a module was called with last: an image, or tokens on a grid.

    ``axis`` is that of the height, the width is next to it; None if the second argument is the size
    itself. ``size`` is None before the first call.
    """

    def __init__(self, axis: int | None = -2) -> None:
        self.axis = axis
        self.size: Grid | None = None

    def attach(self, module: nn.Module) -> None:
        """Follow the calls of a module."""
        module.register_forward_pre_hook(self.record)

    def record(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take the size of what a module is called with."""
        if isinstance(args[0], Tensor):
            sides = args[1] if self.axis is None else args[0].shape[self.axis :]
            self.size = (sides[0], sides[1])


CallHook = TypeVar("CallHook", CallGrid, ConvGrid, CallSize)


def call_hook_of(module: nn.Module, kind: type[CallHook]) -> CallHook | None:
    """Return what follows a module's calls, None if nothing does."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        found = getattr(hook, "__self__", None)
        if isinstance(found, kind):
            return found
    return None


def attach_call_hook(module: nn.Module, new: CallHook) -> CallHook:
    """Return what follows a module's calls already, or let ``new`` do so from now on."""
    found = call_hook_of(module, type(new))
    if found is None:
        new.attach(module)
    return found or new


def size_of_last_call(module: nn.Module) -> Grid | None:
    """Return height and width of what a module was called with last, None if nothing followed."""
    found = call_hook_of(module, CallSize)
    return None if found is None else found.size


def patches_of(conv: nn.Conv2d, image: Grid) -> Grid:
    """Return the grid of patches that a convolution cuts an image into; refuse a smaller image."""
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


def given_size(model: nn.Module) -> Grid | None:
    """Return the image size that a user gave a model as its attribute ``image_size``, in pixels."""
    given = getattr(model, "image_size", None)
    return None if given is None else whole_size("image_size", given)
