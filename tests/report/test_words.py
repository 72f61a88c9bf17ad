# SPDX-License-Identifier: Apache-2.0
"""What is said of a comparison: of a mixer's difference, of the data, of what was left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import make_record, typed

from keymix.analysis.certainty import Settle
from keymix.analysis.statistics import Interval
from keymix.report.checked import Checked
from keymix.report.record import OutcomeRow, Results
from keymix.report.words import said, say


@pytest.fixture(scope="module")
def five() -> Results:
    return replace(typed(make_record(5)), margin=0.015)


def row(n: int, difference: float, half: float, **more: Any) -> OutcomeRow:
    low, high = difference - half, difference + half
    interval = Interval(n=n, difference=difference, low=low, high=high, p=0.5)
    return OutcomeRow(
        mixer="ska", scores={}, **{"seeds": None, "images": None, "interval": interval, **more}
    )


def headline(record: Results, found: OutcomeRow) -> str:
    return say("headline", record, found).replace("\u00a0", " ")


def test_a_difference_has_its_interval_seeds_and_degree(five: Results) -> None:
    clear = row(5, -0.02, 0.01, degree="clear", direction="worse")
    text = "ska: −2.0 points against softmax (95 %: −3.0 to −1.0; 5 seeds), clear."
    assert headline(five, clear) == text
    equal = headline(five, row(5, 0.001, 0.01, degree="equal"))
    assert equal.endswith("equal within 1.5 points.")
    later = row(5, 0.02, 0.01, degree="clear")
    later = replace(later, interval=replace(later.interval, level=0.975))
    assert "97.5 %: " in headline(five, later)


def test_seeds_that_did_not_finish_are_counted(five: Results) -> None:
    assert "; 2 seeds of 5)" in headline(five, row(2, 0.001, 0.02, degree="unclear"))
    none = headline(five, row(2, 0.0, 0.0, degree="unclear", interval=None))
    assert "no seed has finished for both it and softmax" in none
    assert headline(five, row(5, 0.0, 0.1)) == ""  # the baseline has no degree


@pytest.mark.parametrize(
    ("n", "seeds", "units", "expected"),
    [
        (3, (7, 7), None, "7 seeds would settle it."),
        (3, None, (1_200, 3_000), "1,200 to 3,000 test images and 5 seeds would settle it."),
        (5, (6, None), (1_200, 3_000), "6 or more seeds or 1,200 to 3,000 test images would"),
        (3, (6, None), (1_200, 3_000), "6 or more seeds would"),
        (5, None, None, "Neither more seeds nor more test images"),
        (1, (5, None), (1_200, 3_000), "5 or more seeds would settle it."),
    ],
)
def test_what_settles_is_seeds_units_or_nothing(
    five: Results, n: int, seeds: Any, units: Any, expected: str
) -> None:
    settle = Settle(seeds=seeds, units=units)
    assert f" {expected}" in headline(five, row(n, 0.0, 0.1, degree="unclear", settle=settle))


def test_the_two_questions_are_answered_apart(five: Results) -> None:
    alone = Interval(n=5, difference=0.01, low=0.0, high=0.02, p=0.03, p_holm=0.06)
    rough = Interval(n=9, difference=0.01, low=None, high=None, p=None, note="one case alone")
    text = say("detail", five, row(5, 0.01, 0.01, seeds=alone))
    assert text.endswith("0.0 to +2.0, Holm-corrected p = 0.060.")
    assert "one case alone" in say("detail", five, row(5, 0.01, 0.01, images=rough))


def test_recordings_are_called_so(five: Results) -> None:
    record = replace(five, data=replace(five.data, time_steps=4, left_out_count=2))
    assert "2 broken recordings left out" in said("facts", record)
    assert not any("image" in fact for fact in said("facts", record))


def test_the_data_have_their_name_in_the_title(five: Results) -> None:
    for spec, name in (("folder:~/photos/", "photos"), ("digits", "digits"), ("x:3", "x")):
        record = replace(five, data=replace(five.data, spec=spec))
        assert say("title", record).endswith(f" on {name}")


def test_other_environments_are_named_by_what_differs(five: Results) -> None:
    assert "packages, machine" in say("environments", five)
    one = replace(five, trained_with=five.trained_with[:1])
    assert say("environments", one) == ""
    threads = {**one.environment, "threads": "7"}
    here = {key: line for key, line in one.environment.items() if key != "threads"}
    one = replace(one, trained_with=(threads,), environment=here)
    assert say("environments", one) == ""
    elsewhere = replace(one, environment={**here, "python": "4"})
    assert say("environments", elsewhere).endswith("python.")


def test_what_the_data_check_had_no_time_for_is_said(five: Results) -> None:
    checked = Checked(
        findings=(), too_narrow=True, looked_at={}, not_looked_at=("copies among 37 images",)
    )
    narrow, missed = said("data_check", checked, five.data)
    assert "test images are too narrow" in narrow
    assert "copies among 37 images" in missed
