# SPDX-License-Identifier: Apache-2.0
"""What families share in taking another image size: all mixers are asked before any changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.layers import to_2tuple
from torch import nn

from keymix.errors import UserError
from keymix.mixers.base import Grid


def grid_of(embed: Any, img_size: Any, patch_size: Any) -> Grid:
    """Return the grid that a patch embedding would have after ``set_input_size``.

    Args:
        embed: timm's patch embedding.
        img_size: Side, or height and width, in pixels; as it is if None.
        patch_size: Side, or height and width, of a patch in pixels; as it is if None.

    Raises:
        UserError: If a side has no room for a patch.
    """
    height, width = to_2tuple(img_size or embed.img_size)
    down, across = to_2tuple(patch_size or embed.patch_size)
    if height < down or width < across:
        raise UserError(f"img_size={height}x{width} has no room for a patch of {down}x{across}")
    return height // down, width // across


def refuse_unfit(reasons: Mapping[str, str | None]) -> None:
    """Refuse another image size where mixers have a reason against it.

    Args:
        reasons: Path of a mixer to what its ``refuses_grid`` said.

    Raises:
        UserError: With the first reason, its path, and how many more mixers have one.
    """
    against = {path: reason for path, reason in reasons.items() if reason is not None}
    if against:
        path, reason = next(iter(against.items()))
        more = f" (and {len(against) - 1} more)" if len(against) > 1 else ""
        raise UserError(f"{path}{more}: {reason}")


def record_input_size(model: nn.Module, **arguments: Any) -> None:
    """Let timm know the present size, for what it writes about the model on export."""
    from timm.models._input import update_model_input_size

    patch_embed: Any = model.patch_embed
    update_model_input_size(model, patch_embed.img_size, **arguments)
