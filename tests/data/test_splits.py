# SPDX-License-Identifier: Apache-2.0
"""Stratified choices of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keymix.data.sources.base import Faults, Source

from keymix.data.sources.digits import open_source
from keymix.data.splits import choose, digest, make_splits, rest
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
    return open_source("", Faults())


@pytest.mark.parametrize("limit", [None, 20, 300])
def test_parts_never_share_a_row(digits: Source, limit: int | None) -> None:
    parts, _ = make_splits(digits, "digits", limit, 0.1, 3)
    rows = np.concatenate([part.rows for part in parts.values()])
    assert len(np.unique(rows)) == len(rows)
    if limit is not None:
        assert len(parts["train"].rows) + len(parts["val"].rows) == limit
        assert len(parts["test"].rows) == min(limit, 449)


def test_the_test_split_does_not_move_with_the_split_seed(digits: Source) -> None:
    one, other = (make_splits(digits, "digits", None, 0.1, seed)[0] for seed in (0, 1))
    assert (one["test"].rows == other["test"].rows).all()
    assert (one["val"].rows != other["val"].rows).any()


def test_a_source_with_all_three_splits_keeps_its_validation(digits: Source) -> None:
    third = np.arange(len(digits.train)) % 3
    tables = [digits.train.select(np.flatnonzero(third == k)) for k in range(3)]
    source = Source(classes=digits.classes, train=tables[0], val=tables[1], test=tables[2])
    parts, notes = make_splits(source, "x", None, 0.1, 0)
    assert [len(parts[n].rows) for n in ("train", "val", "test")] == [599, 599, 599]
    assert parts["val"].origin == "val"
    parts, _ = make_splits(source, "x", 100, 0.1, 0)
    assert [len(parts[n].rows) for n in ("train", "val", "test")] == [90, 10, 100]
    assert "validation = the source's validation split" in notes


def test_validation_serves_as_test_where_there_is_no_test(digits: Source) -> None:
    source = Source(classes=digits.classes, train=digits.train, val=digits.train)
    parts, notes = make_splits(source, "x", None, 0.1, 0)
    assert parts["test"].origin == "val"
    assert parts["val"].origin == "train"
    assert any(note.startswith("test = the source's validation") for note in notes)


def test_a_validation_that_leaves_nothing_to_learn_from_is_refused(digits: Source) -> None:
    whole = replace(digits, val=digits.train, test=digits.train)
    with pytest.raises(UserError, match="none is left for train"):
        make_splits(whole, "x", 40, 0.999, 0)
