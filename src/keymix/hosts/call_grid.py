# SPDX-License-Identifier: Apache-2.0
"""How mixers hear the grid of a call in models whose blocks are handed tokens alone."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from keymix.layers.checkpoint import recomputing
from keymix.mixers.base import Grid


class CallGrid:
    """The grid of a model's present call, heard at its patch embedding.

    As many tokens may lie on 4x16 or on 16x4, which blocks cannot tell. One of these is shared by
    a patch embedding, which it hears as a hook, and by all hosted mixers of the model.

    Attributes:
        grid: Patches (H, W) of the present or the last call; None before the first.
    """

    def __init__(self) -> None:
        self.grid: Grid | None = None
        self.varies = False  # whether calls may differ

    def of(self, x: Tensor, prefix: int) -> Grid | None:
        """Return the grid of tokens, None where they are not all those of the call.

        Args:
            x: Tokens ``[*, N, C]``; some may have been dropped on the way here.
            prefix: How many lie on no grid.
        """
        if self.grid is None or prefix + self.grid[0] * self.grid[1] != x.shape[-2]:
            return None
        return self.grid

    def hear(self, embed: Any, args: tuple[Any, ...]) -> None:
        """Take the grid of the images that a patch embedding is called with."""
        height, width = args[0].shape[-2:]
        down, across = embed.dynamic_feat_size((height, width))
        self.grid = (down, across)
        self.varies = not getattr(embed, "strict_img_size", True)

    def keep(self, block: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """Return to this call's grid when the backward pass comes to a block's output.

        Under activation checkpointing the block runs again then, perhaps after a call with images
        of another size.
        """
        if not self.varies or torch.compiler.is_compiling() or recomputing():
            return
        if isinstance(out, Tensor) and out.requires_grad:
            there: Any = out
            there.register_hook(partial(self._return_to, self.grid))

    def _return_to(self, grid: Grid | None, gradient: Tensor) -> None:
        self.grid = grid


class CallSize:
    """Height and width of what a module was called with last: an image, or tokens on a grid.

    Attributes:
        size: Of the present or the last call; None before the first.
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis  # of the height; the width is next to it
        self.size: Grid | None = None

    def hear(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take the size of what a module is called with."""
        height, width = args[0].shape[self.axis :][:2]
        self.size = (height, width)


Heard = TypeVar("Heard", CallGrid, CallSize)


def heard_by(module: nn.Module, kind: type[Heard]) -> Heard | None:
    """Return what hears a module's calls, None if nothing does."""
    for hook in module._forward_pre_hooks.values():
        heard = getattr(hook, "__self__", None)
        if isinstance(heard, kind):
            return heard
    return None


def call_size(module: nn.Module, axis: int = -2) -> CallSize:
    """Return what hears the sizes that a module is called with, from now on if nothing did.

    Args:
        module: Called with one tensor first.
        axis: Where the height lies in its shape.
    """
    call = heard_by(module, CallSize)
    if call is None:
        call = CallSize(axis)
        module.register_forward_pre_hook(call.hear)
    return call


def call_grid(embed: nn.Module) -> CallGrid:
    """Return what hears a patch embedding, from now on if nothing did."""
    call = heard_by(embed, CallGrid)
    if call is None:
        call = CallGrid()
        if hasattr(embed, "dynamic_feat_size"):
            embed.register_forward_pre_hook(call.hear)
    return call
