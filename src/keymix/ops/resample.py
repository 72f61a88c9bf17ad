# SPDX-License-Identifier: Apache-2.0
"""Rows that lie on a grid, taken to another grid: keys interpolated, values averaged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Grid = tuple[int, int]


def _image(rows: Tensor, grid: Grid) -> Tensor:
    """Lay rows ``[*, H * W, D]`` out as images ``[prod(*), D, H, W]``."""
    return rows.transpose(-2, -1).reshape(-1, rows.shape[-1], *grid)


def _rows(image: Tensor, lead: torch.Size) -> Tensor:
    """Undo :func:`_image`."""
    rows = image.flatten(2).transpose(-2, -1)
    return rows.reshape(*lead, *rows.shape[1:])


def interpolate(
    rows: Float[Tensor, "*lead R D"], prefix: int, old: Grid, new: Grid
) -> Float[Tensor, "*lead S D"]:
    """Resample rows of a grid bicubically onto another, as position embeddings are.

    The same numbers as timm's ``resample_abs_pos_embed``: antialiased where the grid shrinks,
    pixel centres aligned, in float32 where the rows are narrower.

    Args:
        rows: ``R = prefix + prod(old)`` rows, the prefix first, the rest row by row.
        prefix: Rows that lie on no grid and stay as they are.
        old: The grid they lie on.
        new: The grid wanted, ``S = prefix + prod(new)``. On the same grid, ``rows`` itself.
    """
    if old == new:
        return rows
    first, laid = rows[..., :prefix, :], rows[..., prefix:, :]
    image = _image(laid, old)
    wide = image if image.dtype in (torch.float32, torch.float64) else image.float()
    image = F.interpolate(wide, new, mode="bicubic", antialias=True).to(rows.dtype)
    laid = _rows(image, laid.shape[:-2])
    return torch.cat((first, laid), -2) if prefix else laid


def interpolate_windows(
    rows: Float[Tensor, "windows *lead R D"],
    prefix: int,
    old: Grid,
    new: Grid,
    old_windows: Grid,
    new_windows: Grid,
) -> Float[Tensor, "others *lead S D"]:
    """Resample the rows of all windows as one map over the image.

    Args:
        rows: The rows of each window, windows row by row over the image.
        prefix: Rows of a window that lie on no grid; they are a map over the windows.
        old: Grid inside a window.
        new: The grid wanted inside a window.
        old_windows: How the windows lie (rows, columns).
        new_windows: How the windows wanted lie. Where nothing differs, ``rows`` itself.
    """
    if old == new and old_windows == new_windows:
        return rows
    lead, width = rows.shape[1:-2], rows.shape[-1]
    first, laid = rows[..., :prefix, :], rows[..., prefix:, :]
    # [rows, columns, L, kh, kw, D] -> [L, rows, kh, columns, kw, D]: the map over the image
    laid = laid.reshape(*old_windows, -1, *old, width).permute(2, 0, 3, 1, 4, 5)
    laid = interpolate(
        laid.reshape(len(laid), -1, width),
        0,
        (old_windows[0] * old[0], old_windows[1] * old[1]),
        (new_windows[0] * new[0], new_windows[1] * new[1]),
    )
    laid = laid.reshape(-1, new_windows[0], new[0], new_windows[1], new[1], width)
    laid = laid.permute(1, 3, 0, 2, 4, 5).reshape(-1, *lead, new[0] * new[1], width)
    if not prefix:
        return laid
    first = interpolate(first.movedim(0, -2), 0, old_windows, new_windows).movedim(-2, 0)
    return torch.cat((first, laid), -2)


def pool(
    rows: Float[Tensor, "*lead R D"], prefix: int, old: Grid, new: Grid
) -> Float[Tensor, "*lead S D"]:
    """Average rows of a grid onto another, linear in their number.

    An axis that shrinks is averaged (each new row is the mean of those it touches), an axis that
    grows is interpolated linearly between the rows there are.

    Args:
        rows: ``R = prefix + prod(old)`` rows, the prefix first, the rest row by row.
        prefix: Rows that lie on no grid and stay as they are.
        old: The grid they lie on.
        new: The grid wanted, ``S = prefix + prod(new)``. On the same grid, ``rows`` itself.
    """
    if old == new:
        return rows
    first, laid = rows[..., :prefix, :], rows[..., prefix:, :]
    smaller = (min(old[0], new[0]), min(old[1], new[1]))
    image = F.adaptive_avg_pool2d(_image(laid, old), smaller)
    if smaller != new:
        image = F.interpolate(image, new, mode="bilinear", align_corners=False)
    laid = _rows(image, laid.shape[:-2])
    return torch.cat((first, laid), -2) if prefix else laid
