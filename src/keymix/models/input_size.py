# SPDX-License-Identifier: Apache-2.0
"""What families share in taking another image size: all mixers are asked before any changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from timm.layers import to_2tuple
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import find_mixers
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


def take_input_size(
    model: nn.Module, img_size: int | Grid | None, grids_of: Callable[[nn.Module, Grid], list[Grid]]
) -> None:
    """Change the image size of a model that has an ``img_size`` and a grid a stage.

    Args:
        model: The model, its mixers at ``stages.<s>.…``.
        img_size: Side, or height and width, in pixels; as it is if None.
        grids_of: Says the grid of every stage, for images of a height and width.

    Raises:
        UserError: If a mixer cannot take its new grid; it names the mixer and the remedy, and
            nothing has changed.
    """
    if img_size is None:
        return
    height, width = to_2tuple(img_size)
    grids = grids_of(model, (height, width))
    changes = []
    for path, mixer in find_mixers(model).items():
        grid = grids[int(path.split(".")[1])]
        changes.append((path, mixer, grid, mixer.site.key_grid_on(grid)))
    refuse_unfit({path: mixer.refuses_grid(to, key_grid=keys) for path, mixer, to, keys in changes})
    for _, mixer, to, keys in changes:
        mixer.set_grid(to, key_grid=keys)
    owner: Any = model
    owner.img_size = (height, width)
    record_input_size(model, (height, width))


def record_input_size(model: nn.Module, img_size: Grid, **arguments: Any) -> None:
    """Let timm know the present size, for what it writes about the model on export.

    Args:
        model: The model.
        img_size: Height and width in pixels.
        arguments: The model's other arguments that changed with it.
    """
    from timm.models._input import update_model_input_size

    update_model_input_size(model, img_size, **arguments)
