# SPDX-License-Identifier: Apache-2.0
"""Rows that lie on a grid, taken to another grid: keys interpolated, values averaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Grid = tuple[int, int]


def _on_grid(
    rows: Tensor, prefix: int, old: Grid, new: Grid, resize: Callable[[Tensor], Tensor]
) -> Tensor:
    """Resize rows that lie on ``old``, as images ``[prod(*), D, H, W]``; the prefix stays."""
    if old == new:
        return rows
    first, on_grid = rows[..., :prefix, :], rows[..., prefix:, :]
    lead, width = on_grid.shape[:-2], on_grid.shape[-1]
    image = resize(on_grid.transpose(-2, -1).reshape(-1, width, *old))
    on_grid = image.flatten(2).transpose(-2, -1).reshape(*lead, new[0] * new[1], width)
    return torch.cat((first, on_grid), -2) if prefix else on_grid


def interpolate(
    rows: Float[Tensor, "*lead R D"], prefix: int, old: Grid, new: Grid
) -> Float[Tensor, "*lead S D"]:
    """Resample rows of a grid bicubically onto another, as position embeddings are.

    The ``prefix`` rows come first and stay as they are, the others lie row by row on the grid. On
    the same grid it returns ``rows`` itself. The same numbers as timm's ``resample_abs_pos_embed``:
    antialiased where the grid shrinks, pixel centres aligned, in float32 where rows are narrower.
    """

    def bicubic(image: Tensor) -> Tensor:
        wide = image if image.dtype in (torch.float32, torch.float64) else image.float()
        return F.interpolate(wide, new, mode="bicubic", antialias=True).to(rows.dtype)

    return _on_grid(rows, prefix, old, new, bicubic)


def interpolate_windows(
    rows: Float[Tensor, "windows *lead R D"],
    prefix: int,
    old: Grid,
    new: Grid,
    old_windows: Grid,
    new_windows: Grid,
) -> Float[Tensor, "others *lead S D"]:
    """Resample the rows of all windows as one map over the image.

    Windows are on a grid (rows, columns) over the image, row by row, and have grids inside.
    Prefix rows of the windows lie on no grid inside: they are a map over the windows. Where nothing
    differs, it returns ``rows`` itself.
    """
    if old == new and old_windows == new_windows:
        return rows
    lead, width = rows.shape[1:-2], rows.shape[-1]
    first, on_grid = rows[..., :prefix, :], rows[..., prefix:, :]
    # [rows, columns, L, kh, kw, D] -> [L, rows, kh, columns, kw, D]: the map over the image
    on_grid = on_grid.reshape(*old_windows, -1, *old, width).permute(2, 0, 3, 1, 4, 5)
    on_grid = interpolate(
        on_grid.reshape(len(on_grid), -1, width),
        0,
        (old_windows[0] * old[0], old_windows[1] * old[1]),
        (new_windows[0] * new[0], new_windows[1] * new[1]),
    )
    on_grid = on_grid.reshape(-1, new_windows[0], new[0], new_windows[1], new[1], width)
    on_grid = on_grid.permute(1, 3, 0, 2, 4, 5).reshape(-1, *lead, new[0] * new[1], width)
    if not prefix:
        return on_grid
    first = interpolate(first.movedim(0, -2), 0, old_windows, new_windows).movedim(-2, 0)
    return torch.cat((first, on_grid), -2)


def pool(
    rows: Float[Tensor, "*lead R D"], prefix: int, old: Grid, new: Grid
) -> Float[Tensor, "*lead S D"]:
    """Average rows of a grid onto another, linear in their number; arguments as `interpolate`'s.

    An axis that shrinks is averaged (each new row is the mean of those it touches), an axis that
    grows is interpolated linearly between the rows there are.
    """
    if old != new and not (old[0] % new[0] or old[1] % new[1]):
        # whole cells are summed where they lie, several times as fast as through an image
        down, across = old[0] // new[0], old[1] // new[1]
        lead, width = rows.shape[:-2], rows.shape[-1]
        cells = rows[..., prefix:, :].reshape(*lead, new[0], down, new[1], across, width)
        means = cells.sum(-4).sum(-2).flatten(-3, -2) / (down * across)
        return torch.cat((rows[..., :prefix, :], means), -2) if prefix else means
    smaller = (min(old[0], new[0]), min(old[1], new[1]))

    def average(image: Tensor) -> Tensor:
        image = F.adaptive_avg_pool2d(image, smaller)
        if smaller != new:
            image = F.interpolate(image, new, mode="bilinear", align_corners=False)
        return image

    return _on_grid(rows, prefix, old, new, average)


@cache
def shares(old: int, new: int) -> list[list[float]]:
    """Return which part of each of ``old`` rows of an axis falls to each of ``new``, by the latter.

    A row that :func:`pool` averages into several counts in equal parts in each.
    """
    cells = [range(j * old // new, -(-(j + 1) * old // new)) for j in range(new)]
    touched = [sum(i in cell for cell in cells) for i in range(old)]
    return [[(i in cell) / touched[i] for i in range(old)] for cell in cells]


@cache
def counts(old: Grid, new: Grid) -> list[float]:
    """Return how many rows of a grid lie behind each row that :func:`pool` averages them into."""
    down, across = ([sum(row) for row in shares(*pair)] for pair in zip(old, new, strict=True))
    return [rows * columns for rows in down for columns in across]
