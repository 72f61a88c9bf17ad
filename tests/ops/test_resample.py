# SPDX-License-Identifier: Apache-2.0
"""Resampling of rows on a grid against NumPy loops and timm's position embeddings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from timm.layers import resample_abs_pos_embed

from each import together
from keymix.ops import resample
from tolerances import close

# odd sides, one axis up and the other down, single rows
GRIDS = [
    ((4, 4), (6, 6)),
    ((4, 4), (8, 8)),
    ((6, 6), (3, 3)),
    ((5, 7), (3, 4)),
    ((3, 5), (5, 2)),
    ((1, 4), (3, 4)),
    ((5, 3), (1, 1)),
]


def cubic(x: float) -> float:
    """Keys' kernel with a = -0.5, which antialiased bicubic resampling uses."""
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def cubic_axis(old: int, new: int) -> np.ndarray:
    """Weights ``[new, old]`` of one axis: the kernel widened where the axis shrinks."""
    step = old / new
    wide = max(step, 1.0)
    weights = np.zeros((new, old))
    for i in range(new):
        centre = (i + 0.5) * step
        first = max(int(centre - 2 * wide + 0.5), 0)
        last = min(int(centre + 2 * wide + 0.5), old)
        for j in range(first, last):
            weights[i, j] = cubic((j - centre + 0.5) / wide)
        weights[i] /= weights[i].sum()
    return weights


def mean_axis(old: int, new: int) -> np.ndarray:
    """Weights of one axis: means of what is touched where it shrinks, lines where it grows."""
    weights = np.zeros((new, old))
    for i in range(new):
        if new <= old:
            first, last = i * old // new, math.ceil((i + 1) * old / new)
            weights[i, first:last] = 1 / (last - first)
        else:
            place = max((i + 0.5) * old / new - 0.5, 0.0)
            low = min(int(place), old - 1)
            high = min(low + 1, old - 1)
            weights[i, low] += 1 - (place - low)
            weights[i, high] += place - low
    return weights


AXES = {resample.interpolate: cubic_axis, resample.pool: mean_axis}


def reference(way, rows: np.ndarray, prefix: int, old, new) -> np.ndarray:
    """Both axes in a loop over rows and channels."""
    down, across = (AXES[way](old[i], new[i]) for i in (0, 1))
    out = np.zeros((*rows.shape[:-2], prefix + new[0] * new[1], rows.shape[-1]))
    out[..., :prefix, :] = rows[..., :prefix, :]
    for r in range(new[0]):
        for c in range(new[1]):
            for i in range(old[0]):
                for j in range(old[1]):
                    row = rows[..., prefix + i * old[1] + j, :]
                    out[..., prefix + r * new[1] + c, :] += down[r, i] * across[c, j] * row
    return out


@together
@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("way", [resample.interpolate, resample.pool])
def test_resampling_is_a_loop_over_rows(way, prefix, old, new) -> None:
    rows = torch.randn(2, 3, prefix + old[0] * old[1], 4, dtype=torch.float64)
    wanted = reference(way, rows.numpy(), prefix, old, new)
    close(way(rows, prefix, old, new), torch.from_numpy(wanted))


@pytest.mark.parametrize("way", [resample.interpolate, resample.pool])
def test_the_same_grid_is_the_same_tensor(way) -> None:
    rows = torch.randn(2, 1 + 12, 4)
    assert way(rows, 1, (3, 4), (3, 4)) is rows
    assert not torch.equal(way(rows, 1, (3, 4), (4, 3)), rows)


@together
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_interpolation_is_timms_of_position_embeddings(old, new) -> None:
    rows = torch.randn(1, 2 + old[0] * old[1], 5)
    wanted = resample_abs_pos_embed(rows, list(new), list(old), num_prefix_tokens=2)
    assert torch.equal(resample.interpolate(rows, 2, old, new), wanted)


@pytest.mark.parametrize("way", [resample.interpolate, resample.pool])
@pytest.mark.parametrize(("old", "new"), [((2, 3), (3, 2)), ((3, 3), (2, 4))])
def test_derivatives_meet_finite_differences(way, old, new) -> None:
    rows = torch.randn(1 + old[0] * old[1], 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: way(t, 1, old, new), (rows,))


def test_constant_rows_stay_constant() -> None:
    for way in (resample.interpolate, resample.pool):
        for old, new in GRIDS:
            rows = torch.full((old[0] * old[1], 1), 3.0, dtype=torch.float64)
            close(way(rows, 0, old, new), torch.full((new[0] * new[1], 1), 3.0).double())


def test_narrow_numbers_are_resampled_in_float32() -> None:
    rows = torch.randn(16, 3).bfloat16()
    for way in (resample.interpolate, resample.pool):
        out = way(rows, 0, (4, 4), (6, 6))
        assert out.dtype == torch.bfloat16
        close(out, way(rows.double(), 0, (4, 4), (6, 6)), torch.bfloat16)


@pytest.mark.parametrize("prefix", [0, 2])
def test_windows_are_one_map_over_the_image(prefix: int) -> None:
    old, new, before, after = (2, 3), (3, 2), (2, 2), (3, 4)
    rows = torch.randn(4, 5, prefix + 6, 2, dtype=torch.float64)
    moved = resample.interpolate_windows(rows, prefix, old, new, before, after)
    assert moved.shape == (12, 5, prefix + 6, 2)
    image = torch.zeros(5, 2, 4, 6, dtype=torch.float64)
    for window in range(4):
        for token in range(6):
            r, c = 2 * (window // 2) + token // 3, 3 * (window % 2) + token % 3
            image[:, :, r, c] = rows[window, :, prefix + token]
    down, across = (torch.from_numpy(cubic_axis(*n)) for n in ((4, 9), (6, 8)))
    wanted = torch.einsum("ri,cj,hdij->hdrc", down, across, image)
    for window in range(12):
        for token in range(6):
            r, c = 3 * (window // 4) + token // 2, 2 * (window % 4) + token % 2
            close(moved[window, :, prefix + token], wanted[:, :, r, c])
    over = [torch.from_numpy(cubic_axis(*n)) for n in ((2, 3), (2, 4))]
    first = rows[:, :, :prefix].unflatten(0, before)
    wanted = torch.einsum("ri,cj,ijhpd->rchpd", *over, first).flatten(0, 1)
    close(moved[:, :, :prefix], wanted)
    same = resample.interpolate_windows(rows, prefix, old, old, before, before)
    assert same is rows
