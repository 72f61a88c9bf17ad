# SPDX-License-Identifier: Apache-2.0
"""On which grids a checkpoint's positions lie: what its image size says, or else its counts."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from timm.layers import resize_rel_pos_bias_table
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import encoder_of, find_mixers
from keymix.hosts.windows import HostedWindows, window_grid
from keymix.layers.patches import whole_size
from keymix.mixers.base import Grid
from keymix.mixers.resize import GridBound
from keymix.models.input_size import tell_mixers, without_memory

_REMEDY = "give img_size=, the height and width in pixels of the images they were trained on"
_OTHER = "they were trained on images of another size: give that one, img_size=(height, width)"


@dataclass(frozen=True)
class Geometry:
    """Grids of a model at the image size that weights were made at.

    Args:
        size: That size, pixels; None if nobody said.
        model: The model at that size, without memory; None if nobody said.
    """

    size: Grid | None = None
    model: nn.Module | None = None

    def resolve(self, count: int, mine: Grid, there: Grid | None) -> Grid:
        """Return the grid that so many positions of a checkpoint lie on.

        Args:
            count: Positions.
            mine: The model's own grid.
            there: The model's at the size of the weights, where that is known.

        Raises:
            UserError: If the size contradicts the count, or no size is known and the count alone
                leaves it open.
        """
        if self.size is not None and there is not None:
            if math.prod(there) != count:
                raise UserError(
                    f"holds {count} positions, and images of {self.size[0]}x{self.size[1]} make "
                    f"{there[0]}x{there[1]} here; {_OTHER}"
                )
            return there
        if count == math.prod(mine) and mine[0] == mine[1]:
            return mine
        side = math.isqrt(max(count, 0))
        if count == math.prod(mine) or not side or side * side != count:
            raise UserError(
                f"holds {count} positions, which may lie on more than one grid (the model's is "
                f"{mine[0]}x{mine[1]}); {_REMEDY}"
            )
        return side, side

    def patches(self) -> Grid | None:
        """Grid of the patches at the size of the weights."""
        held = None if self.model is None else encoder_of(self.model)[0]
        embed: Any = getattr(held, "patch_embed", None)
        size = getattr(embed, "grid_size", None)
        return None if size is None else (size[0], size[1])

    def keys(self, path: str) -> Grid | None:
        """Grid of a mixer's keys at the size of the weights; of tokens where keys lie there."""
        if self.model is None:
            return None
        site = find_mixers(self.model)[path].site
        return site.key_grid or site.grid

    def windows(self, path: str, window: Grid) -> Grid | None:
        """How windows of a size lay at the size of the weights."""
        if self.model is None:
            return None
        block: Any = self.model.get_submodule(path.removesuffix(".attn.mixer"))
        resolution = getattr(block, "input_resolution", None)
        return None if resolution is None else window_grid(resolution, window)

    def window(self, path: str, rows: int, mine: Grid) -> Grid:
        """Return the window that a table of relative positions is for.

        Args:
            path: The module that has the table.
            rows: Rows of the checkpoint's table.
            mine: The window of the model.

        Raises:
            UserError: If the rows fit several windows and nothing tells which.
        """
        there: Any = None if self.model is None else self.model.get_submodule(path)
        known = None if there is None else tuple(there.window_size)
        if rows == _rows(mine) and (mine[0] == mine[1] or known == mine):
            return mine
        side = math.isqrt(rows)
        if rows != _rows(mine) and side * side == rows and side % 2:
            return (side + 1) // 2, (side + 1) // 2
        if known is not None and _rows((known[0], known[1])) == rows:
            return known[0], known[1]
        table = f"{path}.relative_position_bias_table has {rows} rows"
        if known is not None and self.size is not None:
            raise UserError(
                f"{table}, and images of {self.size[0]}x{self.size[1]} make windows of "
                f"{known[0]}x{known[1]} here; build the model with window_size=, the height and "
                "width in tokens of the windows that they were trained with"
            )
        raise UserError(
            f"{table}, which fit more than one window (the model's is {mine[0]}x{mine[1]}); "
            f"{_REMEDY}, or build the model with window_size=, that of their windows"
        )


def _rows(window: Grid) -> int:
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def resized_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resample a table of relative positions for windows of another size, as timm does.

    Args:
        table: ``[(2 h - 1) (2 w - 1), heads]``.
        old: Its window.
        new: The window wanted.
    """
    if old == new:
        return table
    shape = (_rows(new), table.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's on timm's interpolation
        moved: Tensor = resize_rel_pos_bias_table(
            table, new_window_size=new, new_bias_shape=shape, old_window_size=old
        )
    return moved


def geometry_at(model: nn.Module, img_size: Any) -> Geometry:
    """Say how a model's grids lie at another image size; the model itself is left alone.

    Args:
        model: Any model.
        img_size: Side, or height and width, pixels; None if nobody knows.

    Raises:
        UserError: If it is no size, or none that the model could have.
    """
    if img_size is None:
        return Geometry()
    size = whole_size("img_size", img_size)
    ghost = _ghost(model)
    try:
        _take(ghost, size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"img_size={size}: {type(model).__name__} has no grid for it: {why}"
        ) from None
    return Geometry(size, ghost)


def _ghost(model: nn.Module) -> nn.Module:
    """Copy a model without its memory; its mixers take any grid."""
    ghost: nn.Module = without_memory(model)
    for mixer in find_mixers(ghost).values():
        if isinstance(mixer, GridBound):
            mixer.resize = "interpolate"
        mixer.refuses_grid = lambda *_, **__: None  # type: ignore[method-assign]
    return ghost


def _take(ghost: Any, size: Grid) -> None:
    """Let a model take an image size."""
    if hasattr(ghost, "set_input_size"):
        ghost.set_input_size(img_size=size)
    elif hasattr(getattr(ghost, "patch_embed", None), "set_input_size"):
        ghost.patch_embed.set_input_size(img_size=size)
    else:
        ghost.img_size = size
    tell_mixers(ghost)


def windowed(model: nn.Module, path: str) -> bool:
    """Whether a table of relative positions at a path is one of windows."""
    module: Any = model.get_submodule(path)
    return isinstance(module, HostedWindows) or hasattr(module, "window_size")
