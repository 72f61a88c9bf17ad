# SPDX-License-Identifier: Apache-2.0
"""The numbers behind order and augmentation: even, independent, the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from each import together
from keymix.data import streams
from keymix.data.streams import Stream, hash64, uniforms

N = 200_000
INDEX = np.arange(N, dtype=np.int64)


def splitmix_finaliser(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_hash_is_the_chained_splitmix_finaliser() -> None:
    mask, state = (1 << 64) - 1, 0
    for key in (3, -7, 1 << 40):
        word = splitmix_finaliser(((key & mask) + 0x9E3779B97F4A7C15) & mask)
        state = splitmix_finaliser((state * 0xD1B54A32D192ED03 + word) & mask)
    assert hash64(3, np.array([-7]), 1 << 40).tolist() == [state]


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 11])
def test_draws_are_uniform(seed: int) -> None:
    draws = uniforms(3, seed, 0, Stream.CROP, INDEX)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    for column in draws.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4


def test_neighbouring_keys_and_draws_are_uncorrelated() -> None:
    pairs = {
        "index": (uniforms(1, 0, 0, 7, INDEX)[:-1, 0], uniforms(1, 0, 0, 7, INDEX)[1:, 0]),
        "epoch": (uniforms(1, 0, 0, 7, INDEX)[:, 0], uniforms(1, 0, 1, 7, INDEX)[:, 0]),
        "seed": (uniforms(1, 0, 0, 7, INDEX)[:, 0], uniforms(1, 1, 0, 7, INDEX)[:, 0]),
        "stream": (uniforms(1, 0, 0, 7, INDEX)[:, 0], uniforms(1, 0, 0, 8, INDEX)[:, 0]),
        "draw": tuple(uniforms(2, 0, 0, 7, INDEX).T),
    }
    for name, (a, b) in pairs.items():
        table = np.histogram2d(a, b, bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(table.ravel()).pvalue > 1e-4, name


def test_keys_do_not_collide_or_commute() -> None:
    grid = hash64(np.arange(500)[:, None], np.arange(500)[None, :])
    assert len(np.unique(grid)) == grid.size


def test_streams_have_different_numbers() -> None:
    assert len({int(s) for s in Stream}) == len(Stream)


@together
@pytest.mark.parametrize("keys", [(), (0,), (-5, 3, 7), (2**63 + 11, 0, 11), (2**64 - 1, 1, 10)])
def test_tensors_draw_the_same_numbers(keys: tuple[int, ...]) -> None:
    edges = np.array([0, 1, -1, 2**62, 2**63 - 1, -(2**63)], dtype=np.int64)
    index = np.concatenate([edges, INDEX[:10_000]])
    drawn = streams.device_uniforms(5, *keys, index=torch.from_numpy(index))
    assert drawn.dtype == torch.float64
    assert (drawn.numpy() == uniforms(5, *keys, index)).all()


@pytest.mark.gpu
def test_a_gpu_draws_the_same_numbers() -> None:
    drawn = streams.device_uniforms(5, 3, 0, 11, index=torch.from_numpy(INDEX).cuda())
    assert (drawn.cpu().numpy() == uniforms(5, 3, 0, 11, INDEX)).all()


def test_numbers_stay_what_they_are() -> None:
    assert hash64(1, 2, np.array([3, 4])).tolist() == [2423678087732800124, 17244063197885422049]
    assert uniforms(2, 1, 2, np.array([3])).tolist() == [[0.10629144683711467, 0.466066879853289]]
