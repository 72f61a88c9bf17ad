# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from each import together
from keymix.data import rle

SIDES = st.integers(1, 9)


def test_runs_count_from_one_row_by_row() -> None:
    mask = rle.decode("2 2 7 3", 3, 4)
    lines = [[0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]]
    assert mask.dtype == np.bool_
    assert (mask == np.array(lines)).all()
    assert rle.encode(np.array(lines)) == "2 2 7 3"
    assert rle.encode(np.ones((2, 5))) == "1 10"


@together
@pytest.mark.parametrize("text", ["", "  ", None, math.nan, "nan", "NaN"])
def test_nothing_is_an_empty_mask(text: str | float | None) -> None:
    mask = rle.decode(text, 2, 3)
    assert mask.shape == (2, 3)
    assert not mask.any()
    assert rle.encode(mask) == ""


@given(arrays(np.bool_, st.tuples(SIDES, SIDES)))
def test_a_mask_comes_back_exactly(mask: np.ndarray[Any, Any]) -> None:
    text = rle.encode(mask)
    assert (rle.decode(text, *mask.shape) == mask).all()
    numbers = list(map(int, text.split()))
    starts, lengths = numbers[::2], numbers[1::2]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    # canonical: in order, and a pixel at least between two runs
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))
    assert sum(lengths) == mask.sum()


@given(st.lists(st.integers(1, 6), max_size=6), st.randoms(use_true_random=False))
def test_runs_in_any_order_and_touching_runs_mean_the_same(lengths: list[int], random) -> None:  # type: ignore[no-untyped-def]
    start, runs = 1, []
    for length in lengths:  # each touches the one before
        runs.append((start, length))
        start += length
    random.shuffle(runs)
    mask = rle.decode(" ".join(f"{a} {b}" for a, b in runs), 6, 7)
    assert rle.encode(mask) == (f"1 {sum(lengths)}" if lengths else "")


def test_the_last_pixel_is_of_the_image() -> None:
    assert rle.decode("12 1", 3, 4)[2, 3]


def test_the_competitions_rows_come_back_exactly(real_data: Path) -> None:
    with (real_data / "uw-madison-gi" / "train.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    texts = [row["segmentation"] for row in rows]
    assert [rle.encode(rle.decode(text, 266, 266)) for text in texts] == texts
    assert sum(map(bool, texts)) == 89


@given(st.data(), SIDES, SIDES)
def test_overlap_counts_the_pixels_of_several_masks(data: Any, height: int, width: int) -> None:
    masks = data.draw(arrays(np.bool_, (3, height, width)))
    runs = [rle.parse(rle.encode(mask), height, width) for mask in masks]
    assert rle.overlap(runs) == (masks.sum(axis=0) > 1).sum()
