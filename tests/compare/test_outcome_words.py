# SPDX-License-Identifier: Apache-2.0
"""What is said of a mixer's difference, by its degree of certainty."""

from __future__ import annotations

from keymix.analysis.certainty import Certainty, Settle
from keymix.analysis.statistics import Interval, Summary
from keymix.compare.outcome import Rules, Words, headline, lead, what_settles
from keymix.report.record import OutcomeRow
from keymix.task import FRACTION, get_task

TASK = get_task("classification")


def words(planned: int = 5) -> Words:
    return Words(mixer="ska", baseline="softmax", planned=planned, score=FRACTION, task=TASK)


def interval(n: int, difference: float, half: float, *, level: float = 0.95) -> Interval:
    low, high = difference - half, difference + half
    return Interval(n=n, difference=difference, low=low, high=high, p=0.5, level=level)


def said(found: Certainty, rules: Rules | None = None, planned: int = 5) -> str:
    return headline(words(planned), found, rules or Rules()).replace("\u00a0", " ")


def test_a_clear_difference_has_its_size_interval_and_seeds() -> None:
    found = Certainty(degree="clear", direction="worse", interval=interval(5, -0.02, 0.01))
    assert said(found) == "ska is worse than softmax by 2.0 points (95 %: −3.0 to −1.0; 5 seeds)."


def test_a_provisional_one_is_called_so_and_a_second_look_has_its_level() -> None:
    shown = interval(3, 0.02, 0.01, level=0.975)
    found = Certainty(degree="provisional", direction="better", interval=shown)
    text = said(found, planned=3)
    assert text.endswith("(97.5 %: +1.0 to +3.0; 3 seeds): provisional.")


def test_equality_has_its_margin() -> None:
    found = Certainty(degree="equal", interval=interval(5, 0.001, 0.01))
    assert said(found, Rules(margin=0.015)).startswith("ska equals softmax within 1.5 points (")


def test_an_unclear_difference_says_what_would_settle_it_and_which_way_it_goes() -> None:
    settle = Settle(seeds=(5, 12), units=(900, None))
    around = Certainty(degree="unclear", interval=interval(3, 0.001, 0.02), settle=settle)
    assert "not distinguishable from softmax here (+0.1 points" in said(around, planned=3)
    assert said(around, planned=3).endswith("5 to 12 seeds would settle it.")
    away = Certainty(degree="unclear", interval=interval(3, -0.05, 0.02), settle=settle)
    assert "ska is worse than softmax by 5.0 points here, which is unclear" in said(away, planned=3)


def test_missing_seeds_are_counted() -> None:
    found = Certainty(degree="unclear", interval=interval(2, 0.001, 0.02))
    assert "2 seeds of 3" in said(found, planned=3)
    none = said(Certainty(degree="unclear"))
    assert "no seed finished for both it and softmax" in none


def test_units_that_belong_together_are_named() -> None:
    found = Certainty(degree="unclear", interval=interval(5, 0.001, 0.02))
    assert "images that belong together make the interval too narrow" in said(
        found, Rules(narrow=True)
    )


def test_what_settles_is_seeds_units_or_nothing() -> None:
    few, many = interval(3, 0.0, 0.1), interval(5, 0.0, 0.1)
    assert what_settles(Settle(seeds=(7, 7), units=None), few, "image") == (
        "7 seeds would settle it."
    )
    units = Settle(seeds=None, units=(1_200, 3_000))
    assert what_settles(units, few, "case") == (
        "1,200 to 3,000 test cases and 5 seeds would settle it."
    )
    both = Settle(seeds=(6, None), units=(1_200, 3_000))
    assert "6 or more seeds or 1,200 to 3,000 test images" in what_settles(both, many, "image")
    assert what_settles(Settle(seeds=None, units=None), many, "image").startswith("Neither")
    assert "At least 5 seeds" in what_settles(both, interval(1, 0.0, 0.1), "image")


def test_the_lead_lists_mixers_by_degree() -> None:
    def row(name: str, degree: str | None, direction: str | None = None) -> OutcomeRow:
        summary = Summary(n=5, mean=0.5, sd=0.01)
        return OutcomeRow(
            mixer=name,
            scores={"top1": summary},
            seeds=None,
            images=None,
            degree=degree,  # type: ignore[arg-type]
            direction=direction,  # type: ignore[arg-type]
            headline="",
            detail="",
        )

    rows = [
        row("softmax", None),
        row("a", "clear", "better"),
        row("b", "equal"),
        row("c", "unclear"),
    ]
    text = lead(rows, baseline="softmax", task=TASK)
    assert "a does better." in text
    assert "b is equal to it within the margin." in text
    assert "Unclear: c." in text
    alone = lead([rows[0], rows[3]], baseline="softmax", task=TASK)
    assert alone.endswith("No mixer is distinguishable from it.")
    later = lead([rows[0], row("d", "provisional", "worse")], baseline="softmax", task=TASK)
    assert "d does worse, provisionally." in later
    balanced = TASK.compared_by("balanced")
    even = [
        OutcomeRow(**{**vars(each), "scores": {"balanced": each.scores["top1"]}}) for each in rows
    ]
    assert "reaches a balanced accuracy of 50.0" in lead(even, baseline="softmax", task=balanced)
