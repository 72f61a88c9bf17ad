# SPDX-License-Identifier: Apache-2.0
"""Stratified choices of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keymix.data.sample import SPLITS, Faults, Row, Source
from keymix.data.sources.digits import open_digits
from keymix.data.specs import Options
from keymix.data.splits import Part, Table, choose, digest, make_splits, rest
from keymix.data.streams import Stream
from keymix.errors import UserError

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def labels_of(counts: list[int]) -> np.ndarray:
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    return np.random.default_rng(0).permutation(labels)


@given(COUNTS, st.integers(0, 500), st.booleans(), st.integers(0, 3))
def test_choices_have_the_number_wanted_and_fair_shares(
    counts: list[int], number: int, leave_one: bool, seed: int
) -> None:
    labels = labels_of(counts)
    rows = choose(labels, number, seed=seed, stream=Stream.LIMIT, leave_one=leave_one)
    caps = np.array(counts) - leave_one
    taken = np.bincount(labels[rows], minlength=len(counts))
    assert len(rows) == min(number, caps.sum())
    assert (np.diff(rows) > 0).all()
    assert (taken <= caps).all()
    if len(rows) >= np.count_nonzero(caps):
        assert (taken[caps > 0] >= 1).all()
    if not leave_one and min(counts) * len(rows) >= len(labels):  # every exact share is >= 1
        assert (abs(taken - np.array(counts) * len(rows) / len(labels)) < 1).all()


def test_choices_depend_on_seed_and_stream_only() -> None:
    labels = labels_of([50, 50])

    def chosen(seed: int, stream: Stream) -> list[int]:
        return choose(labels, 20, seed=seed, stream=stream).tolist()

    assert chosen(0, Stream.TEST) == chosen(0, Stream.TEST)
    assert chosen(0, Stream.TEST) != chosen(1, Stream.TEST)
    assert chosen(0, Stream.TEST) != chosen(0, Stream.VALIDATION)


def test_rest_is_the_complement() -> None:
    assert rest(5, np.array([1, 3])).tolist() == [0, 2, 4]


def test_digest_distinguishes_rows_and_tables() -> None:
    rows = np.array([1, 2, 3])
    assert len(digest("train", rows)) == 64
    assert digest("train", rows) == digest("train", rows.astype(np.int32))
    assert digest("train", rows) != digest("test", rows)
    assert digest("train", rows) != digest("train", rows + 1)


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_digits("", Faults())


def split(source: Source, **options: Any) -> tuple[dict[str, Part], list[str]]:
    table = Table.of(source.rows)
    return make_splits(source, table, "x", Options(**options))


def rows_of(digits: Source, *splits: str) -> list[Row]:
    """Deal the digits out to splits of their own."""
    return [replace(row, split=splits[i % len(splits)]) for i, row in enumerate(digits.rows)]


@pytest.mark.parametrize("limit", [None, 20, 300])
def test_parts_never_share_a_row(digits: Source, limit: int | None) -> None:
    parts, _ = split(digits, limit=limit, split_seed=3)
    rows = np.concatenate([part.index for part in parts.values()])
    assert len(np.unique(rows)) == len(rows)
    if limit is not None:
        assert len(parts["train"].rows) + len(parts["val"].rows) == limit
        assert len(parts["test"].rows) == min(limit, 449)


def test_the_test_split_does_not_move_with_the_split_seed(digits: Source) -> None:
    one, other = (split(digits, split_seed=seed)[0] for seed in (0, 1))
    assert (one["test"].rows == other["test"].rows).all()
    assert (one["val"].rows != other["val"].rows).any()


def test_a_source_with_all_three_splits_keeps_its_validation(digits: Source) -> None:
    source = replace(digits, rows=rows_of(digits, "test", "train", "val"))
    parts, notes = split(source)
    assert [len(parts[n].rows) for n in SPLITS] == [599, 599, 599]
    assert parts["val"].origin == "val"
    assert parts["val"].index.tolist() == list(range(2, 1797, 3))
    parts, _ = split(source, limit=100)
    assert [len(parts[n].rows) for n in SPLITS] == [90, 10, 100]
    assert "validation = the source's validation split" in notes


def test_validation_serves_as_test_where_there_is_no_test(digits: Source) -> None:
    parts, notes = split(replace(digits, rows=rows_of(digits, "", "val")))
    assert parts["test"].origin == "val"
    assert parts["val"].origin == "train"
    assert any(note.startswith("test = the source's validation") for note in notes)


def test_a_validation_that_leaves_nothing_to_learn_from_is_refused(digits: Source) -> None:
    whole = replace(digits, rows=rows_of(digits, *SPLITS))
    with pytest.raises(UserError, match="none is left for train"):
        split(whole, limit=40, val_fraction=0.999)
