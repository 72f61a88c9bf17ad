# SPDX-License-Identifier: Apache-2.0
"""A study of memory against tokens: its answer, and what its page says of it."""

from __future__ import annotations

from typing import Any

from test_html import read, words

from keymix.analysis.study_record import StudyRecord
from keymix.records import from_json
from keymix.studies.memory.result import MemoryGrowth

EVIL = "<script>alert('x')</script>&\"'"


def memory_record(peaks: dict[str, list[float | None]]) -> MemoryGrowth:
    """A record of some mixers at 10, 20, … to the side; None where nothing was measured."""
    count = len(next(iter(peaks.values())))
    sides = [10 * (i + 1) for i in range(count)]
    rows: list[dict[str, Any]] = [
        {"mixer": mixer, "side": side, "tokens": side * side, "mib": mib}
        | ({"reason": f"RuntimeError: {EVIL}"} if mib is None else {})
        for mixer, found in peaks.items()
        for side, mib in zip(sides, found, strict=True)
    ]
    record = {
        "mixers": list(peaks),
        "dim": 256,
        "num_heads": 1,
        "sides": sides,
        "order": "quadratic",
        "device": "cpu",
        "how": "counted",
        "rows": rows,
        "complete": True,
        "command": "keymix analyze memory",
        "created": "2025-01-01 00:00 UTC",
        "environment": {"keymix": "0.0", "machine": "some"},
    }
    made = from_json(MemoryGrowth, record, where="the record")
    made.made_by = from_json(StudyRecord, record, where="the record")
    return made


def test_two_mixers_are_compared_at_the_most_tokens_where_both_were_measured() -> None:
    found = memory_record({"qk_token": [0.1, 0.5, 1.0], "spiking_self": [0.2, 3.6, None]})
    assert found.answer == (
        "The attention of qk_token takes 7.2 times less memory than that of spiking_self at 400 "
        "tokens: 0.50 MiB against 3.60 MiB"
    )


def test_a_small_difference_is_none() -> None:
    assert "takes 1.1 times less memory than" in memory_record({"a": [10.0], "b": [11.0]}).answer
    same = memory_record({"a": [10.0], "b": [10.2]}).answer
    assert same.startswith("The attention of a takes as much memory as that of b at 100 tokens")


def test_one_and_several_mixers_have_an_answer() -> None:
    assert memory_record({"a": [1.0, 2048.0]}).answer == (
        "The attention of a takes 2.0 GiB at 400 tokens"
    )
    several = memory_record({"a": [1.0], "b": [4.0], "c": [2.0]})
    assert several.answer == (
        "The attention of a takes 4.0 times less memory than that of b at 100 tokens: 1.00 MiB "
        "against 4.00 MiB, the least and the most of 3 mixers"
    )


def test_what_was_not_measured_is_named_without_the_text_of_an_error() -> None:
    nothing = memory_record({"a": [None], EVIL: [None]})
    assert nothing.answer.startswith("The memory of a and ")
    page = nothing.html()
    assert EVIL not in page
    assert "RuntimeError" not in page
    assert "could not be measured at 100 tokens" in words(page)
    assert read(page).open == []
    assert "<svg" not in page
