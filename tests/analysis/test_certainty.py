# SPDX-License-Identifier: Apache-2.0
"""How certain a difference is: the crossed interval, its degrees, looks, and the recommendation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from keymix.analysis.answers import whole
from keymix.analysis.certainty import (
    CLEAR_SEEDS,
    Candidate,
    Certainty,
    Decision,
    Evidence,
    TrainingCost,
    alpha_of_look,
    foreseen_margin,
    is_equal,
    judge,
    needed,
    recommend,
    smallest_margin,
)
from keymix.analysis.statistics import (
    EVERY_SEED,
    Crossed,
    Interval,
    crossed,
    crossed_difference,
    crossed_mean,
    over_images,
    over_seeds,
)
from keymix.task import FRACTION, Score
from keymix.tasks.classification.answers import ClassAnswers

Runs = dict[int, ClassAnswers]


def of(right: np.ndarray, target: np.ndarray | None = None, *, balanced: bool = False) -> Runs:
    """Answers by seed of whether images are right, ``[S, N]``, of two classes."""
    n = right.shape[1]
    true = np.ones(n, dtype=np.int64) if target is None else target
    return {
        s: ClassAnswers(
            index=np.arange(n),
            target=true,
            predicted=np.where(row, true, 1 - true),
            top5=np.ones(n, dtype=bool),
            confidence=np.ones(n, dtype=np.float16),
            classes=("a", "b"),
            balanced=balanced,
        )
        for s, row in enumerate(right)
    }


def drawn(seeds: int, images: int, accuracy: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((seeds, images)) < accuracy


def evidence(ours: Runs, theirs: Runs, *, control: bool = False) -> Evidence:
    one, two = ({s: whole(a) for s, a in runs.items()} for runs in (ours, theirs))
    right, base = ({s: a.correct for s, a in runs.items()} for runs in (ours, theirs))
    return Evidence(
        crossed=crossed_difference(ours, theirs),
        by_seed=[one[s] - two[s] for s in one],
        seeds=over_seeds(one, two),
        units=over_images(right, base),
        control=control,
    )


def judged(ours: Runs, theirs: Runs, **more: Any) -> Certainty:
    return judge({"m": evidence(ours, theirs)}, score=FRACTION, **more)["m"]


# ---- the crossed interval -------------------------------------------------------------------


def test_the_crossed_error_is_that_of_both_less_what_is_in_both():
    draw = np.random.default_rng(1).normal
    x = draw(size=(4, 30)) + np.arange(4)[:, None] + 2 * draw(size=30)
    found = crossed(x.mean(1).tolist(), list(x))
    assert found is not None
    left = x - x.mean(1, keepdims=True) - x.mean(0) + x.mean()
    mse = (left**2).sum() / (3 * 29)
    seeds, units = x.mean(1).var(ddof=1) / 4, x.mean(0).var(ddof=1) / 30
    assert found.error == pytest.approx(math.sqrt(seeds + units - mse / 120))
    df = found.error**4 / (seeds**2 / 3 + units**2 / 29)
    assert found.df == pytest.approx(df)
    low, high = found.ends()
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, df) * found.error)


def test_neither_part_is_less_than_what_is_in_both():
    x = np.array([[1.0, -1.0] * 20, [-1.0, 1.0] * 20])  # seeds agree on the mean, by chance
    found = crossed([0.0, 0.0], list(x))
    assert found is not None
    assert found.var_seeds == found.var_rest > 0


def test_of_one_seed_it_is_the_interval_over_units():
    ours, theirs = of(drawn(1, 400, 0.8)), of(drawn(1, 400, 0.7, seed=1))
    found, units = crossed_difference(ours, theirs), evidence(ours, theirs).units
    assert found is not None
    assert units is not None
    assert found.ends() == pytest.approx((units.low, units.high), abs=0.002)


def test_equal_answers_have_a_width_all_the_same():
    ours = of(drawn(5, 400, 0.8))
    found = crossed_difference(ours, ours)
    assert found is not None
    assert found.mean == 0
    assert 0.002 < found.half(0.95) < 0.02


def test_answers_that_no_seed_changes_are_compared_with_every_seed():
    ours = of(drawn(3, 200, 0.8))
    fixed = of(drawn(1, 200, 0.5, seed=1))[0]
    found = crossed_difference(ours, {EVERY_SEED: fixed})
    assert found is not None
    assert found.mean == pytest.approx(np.mean([whole(a) for a in ours.values()]) - whole(fixed))


def test_an_interval_of_balanced_accuracy_is_stratified_by_class():
    target = np.repeat([0, 1], [90, 10])
    right = drawn(1, 100, 0.7)
    found = crossed_mean(of(right, target, balanced=True))
    assert found is not None
    shares = [right[0, target == k].mean() for k in (0, 1)]
    parts = [s * (1 - s) * n / (n - 1) / n for s, n in zip(shares, (90, 10), strict=True)]
    assert found.mean == pytest.approx(np.mean(shares))
    assert found.error**2 == pytest.approx(sum(parts) / 4 * 100 / 99, rel=1e-6)


def test_one_image_has_no_interval():
    assert crossed_mean(of(drawn(3, 1, 0.5))) is None
    assert crossed([], []) is None
    assert crossed([math.nan], [np.array([math.nan, 1.0])]) is None


# ---- degrees ---------------------------------------------------------------------------------


def test_five_seeds_and_a_crossed_interval_without_zero_are_clear():
    found = judged(of(drawn(5, 2_000, 0.8)), of(drawn(5, 2_000, 0.7, seed=1)))
    assert (found.degree, found.direction) == ("clear", "better")
    assert found.interval is not None
    assert found.interval.low is not None
    assert found.interval.low > 0
    assert found.settle is None


def test_less_is_better_of_an_error():
    error = Score(key="e", name="error", short="e", label="e", better="less", high=None, unit="mm")
    rows = {"m": evidence(of(drawn(5, 2_000, 0.8)), of(drawn(5, 2_000, 0.7, seed=1)))}
    assert judge(rows, score=error, margin=None)["m"].direction == "worse"


def test_three_seeds_are_provisional_at_best_and_only_if_all_agree():
    base = of(drawn(3, 2_000, 0.7, seed=1))
    found = judged(of(drawn(3, 2_000, 0.8)), base)
    assert (found.degree, found.direction) == ("provisional", "better")
    rows = evidence(of(drawn(3, 2_000, 0.8)), base)
    one_other = replace(rows, by_seed=[*rows.by_seed[:2], -0.001])
    assert judge({"m": one_other}, score=FRACTION)["m"].degree == "unclear"
    assert rows.seeds is not None
    around_zero = replace(rows, seeds=replace(rows.seeds, low=-0.01))
    assert judge({"m": around_zero}, score=FRACTION)["m"].degree == "unclear"


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_seeds_leave_everything_unclear(seeds: int):
    found = judged(of(drawn(seeds, 2_000, 0.9)), of(drawn(seeds, 2_000, 0.5, seed=1)))
    assert (found.degree, found.direction) == ("unclear", None)


def test_equal_needs_two_one_sided_tests_and_five_seeds():
    right = drawn(10, 20_000, 0.7)
    same = right.copy()
    for row in same:  # as many become wrong as right
        wrong, right_ones = np.flatnonzero(~row)[:200], np.flatnonzero(row)[:200]
        row[wrong], row[right_ones] = True, False
    assert judged(of(same), of(right)).degree == "equal"
    assert judged(of(same[:4]), of(right[:4])).degree != "equal"
    assert judged(of(same), of(right), margin=None).degree != "equal"
    found = crossed_difference(of(same), of(right))
    assert found is not None
    low, high = found.ends(0.9)
    edge = max(abs(low), abs(high))
    assert is_equal(found, edge * 1.001, 0.05)
    assert not is_equal(found, edge * 0.999, 0.05)


def test_holm_counts_the_named_mixers_and_no_control():
    base = of(drawn(5, 300, 0.7, seed=9))
    rows = {str(i): evidence(of(drawn(5, 300, 0.74, seed=i)), base) for i in range(5)}
    found = judge(rows, score=FRACTION)
    alone = {label: judge({label: row}, score=FRACTION)[label] for label, row in rows.items()}
    least = min(rows, key=lambda m: rows[m].crossed.p)  # type: ignore[union-attr]
    pair = [each.interval for each in (found[least], alone[least])]
    assert pair[0] is not None
    assert pair[1] is not None
    assert pair[0].p_holm == pytest.approx(5 * pair[1].p_holm)  # type: ignore[operator]
    control = judge({**rows, least: replace(rows[least], control=True)}, score=FRACTION)[least]
    assert control.interval is not None
    assert control.interval.p_holm == pair[1].p


def test_units_that_belong_together_decide_nothing():
    found = judged(of(drawn(5, 2_000, 0.9)), of(drawn(5, 2_000, 0.5, seed=1)), narrow=True)
    assert found.degree == "unclear"
    assert found.interval is not None


def test_every_further_look_halves_alpha_and_widens_the_interval():
    assert [alpha_of_look(n) for n in (1, 2, 3)] == pytest.approx([0.05, 0.025, 0.0125])
    ours, theirs = of(drawn(5, 500, 0.75)), of(drawn(5, 500, 0.7, seed=1))
    first, second = (judged(ours, theirs, alpha=alpha_of_look(n)).interval for n in (1, 2))
    assert first is not None
    assert second is not None
    assert second.level == pytest.approx(0.975)
    assert second.low < first.low  # type: ignore[operator]


# ---- what would settle it -------------------------------------------------------------------


def precision(mean: float, of_seeds: float, of_units: float, *, seeds: int = 3) -> Crossed:
    return Crossed(
        mean=mean,
        seeds=seeds,
        units=1_000,
        var_seeds=of_seeds,
        var_units=of_units,
        var_rest=0.0,
    )


def test_where_seeds_scatter_seeds_settle_it():
    found = needed(precision(0.03, 2e-4, 1e-7), margin=0.02, alpha=0.05)
    assert found.seeds is not None
    assert found.seeds[0] >= CLEAR_SEEDS
    low, high = found.seeds
    assert high is None or low <= high
    exact = precision(0.03, 2e-4, 1e-7)
    assert exact.error_with(seeds=12) == pytest.approx(math.sqrt(2e-4 * 3 / 12 + 1e-7))


def test_where_images_scatter_images_settle_it():
    found = needed(precision(0.005, 1e-9, 4e-4), margin=0.02, alpha=0.05)
    assert found.seeds is None
    assert found.units is not None
    assert found.units[0] > 1_000


def test_of_one_seed_nothing_but_seeds_is_known():
    found = needed(precision(0.01, 0.0, 1e-4, seeds=1), margin=0.02, alpha=0.05)
    assert found.seeds == (CLEAR_SEEDS, None)
    assert found.units is None


def test_the_smallest_margin_grows_with_the_error():
    few, many = (smallest_margin([precision(0.0, 1e-5, units)]) for units in (4e-4, 1e-5))
    assert few is not None
    assert many is not None
    assert few > many > 0
    assert smallest_margin([]) is None


def test_a_foreseen_margin_shrinks_with_units_and_seeds_and_has_a_floor_of_seeds():
    of_units = [foreseen_margin(units, 5) for units in (449, 1_000, 10_000, 10**9)]
    assert of_units == sorted(of_units, reverse=True)
    assert of_units[0] > 0.02 > of_units[2]  # as the simulation: ties are seen at 10,000 alone
    assert of_units[3] > 0.005  # trainings still differ
    assert foreseen_margin(449, 10) < of_units[0]
    assert foreseen_margin(449, 5, 0.025) > of_units[0]


# ---- which to take --------------------------------------------------------------------------


def candidate(
    accuracy: float,
    step: float,
    *,
    seed: int = 0,
    seeds: int = 5,
    images: int = 5_000,
    macs: float = 1.0,
    spread: float = 0.0,
) -> Candidate:
    """A mixer of an accuracy, of which a training step takes so long, give or take a spread."""
    runs = of(drawn(seeds, images, accuracy, seed=seed))
    cost = TrainingCost(low=step - spread, high=step + spread, macs=macs)
    return Candidate(validation=accuracy, answers=runs, cost=cost)


def decided(margin: float | None = 0.03, missing: str = "", **mixers: Candidate) -> Decision:
    base = mixers["base"].answers
    ready = {
        label: replace(each, interval=against(each.answers, base)) for label, each in mixers.items()
    }
    ready["base"] = mixers["base"]
    return recommend(ready, baseline="base", margin=margin, score=FRACTION, missing=missing)


def against(ours: Any, base: Any) -> Interval | None:
    found = crossed_difference(ours, base)
    if found is None:
        return None
    low, high = found.ends()
    return Interval(n=found.seeds, difference=found.mean, low=low, high=high, p=found.p)


def test_the_cheapest_that_keeps_up_with_the_best_on_validation_is_taken():
    found = decided(
        base=candidate(0.70, 3.0),
        best=candidate(0.702, 4.0, seed=1),
        equal=candidate(0.70, 2.0, seed=2),
        worse=candidate(0.6, 1.0, seed=3),
    )
    assert (found.verdict, found.reason, found.pick, found.best) == (
        "take",
        "cheaper",
        "equal",
        "best",
    )
    assert found.subject == found.rival == "equal"
    assert found.interval is not None
    assert found.against_best is not None
    assert found.against_best.low > -0.03  # type: ignore[operator]


def test_the_baseline_is_kept_where_it_is_the_cheapest_that_keeps_up():
    found = decided(base=candidate(0.70, 2.0), best=candidate(0.702, 4.0, seed=1))
    assert (found.verdict, found.pick, found.rival, found.subject) == (
        "keep",
        "base",
        "base",
        "best",
    )


def test_where_every_cheaper_mixer_falls_behind_the_best_is_taken():
    found = decided(base=candidate(0.6, 1.0), best=candidate(0.7, 4.0, seed=1))
    assert (found.verdict, found.reason, found.pick) == ("take", "ahead", "best")
    kept = decided(base=candidate(0.7, 4.0), worse=candidate(0.6, 1.0, seed=1))
    assert (kept.verdict, kept.reason, kept.pick) == ("keep", "ahead", "base")
    assert kept.subject == "worse"


def test_a_cheaper_mixer_that_may_keep_up_or_not_leaves_it_undecided():
    few = {"images": 300, "seeds": 3}
    found = decided(
        0.02, base=candidate(0.70, 1.0, **few), best=candidate(0.71, 4.0, seed=1, **few)
    )
    assert (found.verdict, found.reason, found.pick) == ("undecided", "open", None)
    assert (found.best, found.subject, found.rival) == ("best", "best", "base")
    assert found.settle is not None
    assert found.interval is not None


def test_a_tie_never_recommends_the_dearer_mixer():
    """Two mixers of one accuracy at 400 images: the dearer is the best on validation by chance."""
    tie = {"images": 400, "seeds": 3, "seed": 1}
    dear, cheap = candidate(0.965, 3.0, **tie), candidate(0.964, 2.0, **{**tie, "seed": 2})
    found = decided(0.02, base=candidate(0.96, 2.5, images=400, seeds=3), dear=dear, cheap=cheap)
    assert found.best == "dear"
    assert found.pick != "dear"


def test_steps_within_the_spread_of_the_timing_are_decided_by_multiply_adds():
    near = {"spread": 0.2}
    found = decided(
        base=candidate(0.7, 1.0, macs=9.0, **near), other=candidate(0.699, 1.1, macs=5.0, **near)
    )
    assert found.pick == "other"  # its step looks longer
    clear = decided(
        base=candidate(0.699, 1.0, macs=9.0), other=candidate(0.7, 1.1, seed=0, macs=5.0)
    )
    assert clear.pick == "base"
    same = decided(base=candidate(0.7, 1.0, **near), other=candidate(0.699, 1.1, **near))
    assert same.pick == "base"  # neither is cheaper


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("seeds", {"seeds": 2}),
        ("one_unit", {"images": 1}),
    ],
)
def test_what_is_missing_is_said_with_the_leader_so_far(reason: str, more: dict[str, int]):
    found = decided(base=candidate(0.5, 1.0, **more), ahead=candidate(0.75, 1.0, seed=1, **more))
    assert (found.verdict, found.reason, found.pick) == ("undecided", reason, None)
    assert (found.best, found.subject, found.seeds) == ("ahead", "ahead", more.get("seeds", 5))


def test_without_a_margin_costs_or_runs_nothing_is_decided():
    pair = {"base": candidate(0.5, 1.0), "ahead": candidate(0.75, 1.0, seed=1)}
    assert decided(None, **pair).reason == "margin"
    assert decided(missing="control_level", **pair).reason == "control_level"
    free = {label: replace(each, cost=None) for label, each in pair.items()}
    assert decided(**free).reason == "costs"
    none = recommend({}, baseline="base", margin=0.02, score=FRACTION)
    assert (none.verdict, none.reason, none.best) == ("undecided", "runs", None)
    alone = decided(base=candidate(0.5, 1.0))
    assert (alone.verdict, alone.reason, alone.subject) == ("keep", "alone", None)
