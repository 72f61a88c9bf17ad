# SPDX-License-Identifier: Apache-2.0
r"""How certain a difference from the baseline is, in four degrees, and which mixer to take.

One interval is quoted, over seeds and test units together (`keymix.analysis.statistics.Crossed`);
terminal, page, CSV and JSON all have it from `judge`. With the significance level :math:`\alpha`
of this look at the comparison (`alpha_of_look`), a mixer is

- *clear*, better or worse: Holm-corrected p of the crossed interval below :math:`\alpha`, and five
  seeds or more;
- *provisional*, better or worse: three or four seeds, all differences of one sign, Holm-corrected p
  over test units below :math:`\alpha`, and an interval over seeds without 0;
- *equal* within a margin: five seeds or more, and the crossed interval at :math:`1 - 2\alpha` lies
  within ± the margin (two one-sided tests);
- *unclear* otherwise.

Holm's correction is over the mixers that were named; a control is tested by itself. How often each
degree is wrong is measured by ``benchmarks/certainty.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy import stats

from keymix.analysis.answers import Answers, bounded
from keymix.analysis.statistics import (
    LEVEL,
    TWO_SEEDS,
    Crossed,
    Interval,
    crossed_difference,
    holm,
    quoted,
)
from keymix.task import Score

Degree = Literal["clear", "provisional", "equal", "unclear"]
Direction = Literal["better", "worse"]

CLEAR_SEEDS = 5
"""Pairs of runs from which on a difference can be clear, or shown to be none."""
PROVISIONAL_SEEDS = 3
"""Pairs of runs from which on a difference can be provisional, and a mixer recommended."""
MARGIN = 0.02
"""Differences of fractions up to this count as equal, where nobody says another margin."""
MOST_SEEDS = 30
"""Seeds up to which it is said how many would settle an unclear difference."""
_GROWTH = 1.1  # from one number of test units that is tried to the next
_MOST_GROWTH = 100.0  # times as many test units as there are, at most

Range = tuple[int, int | None]
"""From and to; None for more than is tried."""


def alpha_of_look(look: int) -> float:
    """Return the significance level of a look at a comparison, 0.05 halved at each further one.

    Adding seeds until a difference is significant gives 12 to 15 % false alarms at 0.05.

    Args:
        look: 1 for the first time that all of its runs were finished.
    """
    return (1 - LEVEL) * 0.5 ** (look - 1)


@dataclass(frozen=True, kw_only=True)
class Settle:
    """What would settle an unclear difference: seeds, or test units, each as a range.

    None where no number that is tried would.
    """

    seeds: Range | None
    units: Range | None


@dataclass(frozen=True, kw_only=True)
class Certainty:
    """How a mixer compares with the baseline.

    Args:
        degree: How certain it is.
        direction: For a clear or provisional difference, whether the mixer is better or worse.
        interval: The difference over seeds and test units; None without a pair of runs.
        settle: For an unclear difference, what would settle it.
    """

    degree: Degree
    direction: Direction | None = None
    interval: Interval | None = None
    settle: Settle | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a mixer's difference from the baseline.

    Args:
        crossed: Over seeds and test units; None where it is not defined.
        by_seed: The difference at each seed that both have finished.
        seeds: The interval over seeds, corrected or not.
        units: That over test units, likewise.
        control: Whether the mixer is a control, which is tested by itself.
    """

    crossed: Crossed | None
    by_seed: Sequence[float]
    seeds: Interval | None
    units: Interval | None
    control: bool = False


def judge(
    evidence: Mapping[str, Evidence],
    *,
    alpha: float = 1 - LEVEL,
    margin: float | None = MARGIN,
    score: Score,
    narrow: bool = False,
) -> dict[str, Certainty]:
    """Return how certain each mixer's difference from the baseline is.

    Args:
        evidence: By mixer's label.
        alpha: Significance level, of `alpha_of_look`.
        margin: Differences up to this are equal; None where nothing counts as equal.
        score: The score of which these are differences.
        narrow: Whether test units belong together, so that intervals over them are too narrow and
            decide nothing.
    """
    of_crossed = _corrected(evidence, lambda each: each.crossed.p if each.crossed else None)
    of_units = _corrected(evidence, lambda each: each.units.p if each.units else None)
    family = max(1, sum(not each.control for each in evidence.values()))
    return {
        label: _judged(
            each,
            of_crossed[label],
            of_units[label],
            alpha=alpha,
            margin=margin,
            score=score,
            narrow=narrow,
            family=1 if each.control else family,
        )
        for label, each in evidence.items()
    }


def _corrected(
    evidence: Mapping[str, Evidence], p_of: Callable[[Evidence], float | None]
) -> dict[str, float | None]:
    """Correct p-values by Holm over the mixers that are no controls."""
    named = [label for label, each in evidence.items() if not each.control]
    adjusted = dict(zip(named, holm([p_of(evidence[label]) for label in named]), strict=True))
    return {label: adjusted.get(label, p_of(each)) for label, each in evidence.items()}


def _judged(
    found: Evidence,
    p_crossed: float | None,
    p_units: float | None,
    *,
    alpha: float,
    margin: float | None,
    score: Score,
    narrow: bool,
    family: int,
) -> Certainty:
    interval = _interval(found, p_crossed, alpha, score)
    if interval is None or found.crossed is None or narrow:
        return Certainty(degree="unclear", interval=interval)
    difference, pairs = found.crossed.mean, len(found.by_seed)
    direction: Direction = "better" if score.ahead(difference) else "worse"
    if pairs >= CLEAR_SEEDS and p_crossed is not None and p_crossed < alpha:
        return Certainty(degree="clear", direction=direction, interval=interval)
    few = PROVISIONAL_SEEDS <= pairs < CLEAR_SEEDS
    if few and _all_agree(found, p_units, alpha):
        return Certainty(degree="provisional", direction=direction, interval=interval)
    if pairs >= CLEAR_SEEDS and is_equal(found.crossed, margin, alpha):
        return Certainty(degree="equal", interval=interval)
    settle = needed(found.crossed, margin=margin, alpha=alpha / family)
    return Certainty(degree="unclear", interval=interval, settle=settle)


def _interval(found: Evidence, p_holm: float | None, alpha: float, score: Score) -> Interval | None:
    """Return the interval that is quoted; over units alone where there is one seed."""
    if found.seeds is None:
        return None
    pairs, estimate = len(found.by_seed), found.crossed
    notes = [found.units.note] if found.units and found.units.note else []
    if estimate is None:
        note = "; ".join(notes) or "the difference is not defined"
        difference = found.seeds.difference
        return Interval(n=pairs, difference=difference, low=None, high=None, p=None, note=note)
    low, high = quoted(score, *estimate.ends(1 - alpha), seeds=pairs)
    if low is None:
        notes.append(TWO_SEEDS)
    if pairs == 1:
        notes.append("one seed: what another training would give is not in it")
    return Interval(
        n=pairs,
        difference=estimate.mean,
        low=low,
        high=high,
        p=estimate.p,
        p_holm=p_holm,
        note="; ".join(notes),
        level=1 - alpha,
    )


def _all_agree(found: Evidence, p_units: float | None, alpha: float) -> bool:
    """Whether all seeds agree in sign, and both questions leave out 0."""
    signs = {math.copysign(1, each) if each else 0.0 for each in found.by_seed}
    seeds = found.seeds
    if len(signs) != 1 or seeds is None or seeds.low is None or seeds.high is None:
        return False
    return seeds.low * seeds.high > 0 and p_units is not None and p_units < alpha


def is_equal(found: Crossed, margin: float | None, alpha: float) -> bool:
    """Whether two one-sided tests place the difference within ± a margin."""
    if margin is None:
        return False
    low, high = found.ends(1 - 2 * alpha)
    return -margin < low and high < margin


def needed(found: Crossed, *, margin: float | None, alpha: float) -> Settle:
    """Say how many seeds, or test units, would make a difference clear or equal.

    As a range: for the difference that was found, and for one standard error more and less.

    Args:
        found: The difference.
        margin: As `judge` takes it.
        alpha: Significance level, divided by the mixers that are compared.
    """
    if found.seeds < 2:
        return Settle(seeds=(CLEAR_SEEDS, None), units=None)
    true = [abs(found.mean) + k * found.error for k in (-1, 0, 1)]
    true = [max(each, 0.0) for each in true]
    seeds = range(max(CLEAR_SEEDS, found.seeds), MOST_SEEDS + 1)
    grown = int(math.log(_MOST_GROWTH) / math.log(_GROWTH))
    units = [math.ceil(found.units * _GROWTH**k) for k in range(1, grown)]
    least = max(CLEAR_SEEDS, found.seeds)
    return Settle(
        seeds=_range(true, seeds, lambda n: found.error_with(seeds=n), margin, alpha),
        units=_range(true, units, lambda n: found.error_with(seeds=least, units=n), margin, alpha),
    )


def _range(
    differences: Sequence[float],
    numbers: Sequence[int],
    error_of: Callable[[int], float],
    margin: float | None,
    alpha: float,
) -> Range | None:
    """Return the least and the most of the numbers that settle one of several differences."""
    both, one = (float(stats.norm.isf(a)) for a in (alpha / 2, alpha))

    def settles(difference: float, number: int) -> bool:
        error = error_of(number)
        equal = margin is not None and difference + one * error < margin
        return difference > both * error or equal

    first = [next((n for n in numbers if settles(d, n)), None) for d in differences]
    found = [n for n in first if n is not None]
    if not found:
        return None
    return min(found), None if None in first else max(found)


# ---- which to take --------------------------------------------------------------------------

Verdict = Literal["take", "keep", "undecided"]


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """What training a model costs: the quartiles of a step's time, and multiply-adds.

    None where it was not measured, or not counted.
    """

    low: float | None
    high: float | None
    macs: float | None

    def below(self, other: TrainingCost) -> bool:
        """Whether it is cheaper: by its step beyond the spread of both, else by multiply-adds."""
        if self._faster(other) or other._faster(self):
            return self._faster(other)
        return self.macs is not None and other.macs is not None and self.macs < other.macs

    def _faster(self, other: TrainingCost) -> bool:
        return self.high is not None and other.low is not None and self.high < other.low


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mixer that may be recommended.

    Args:
        validation: Its mean score on validation; None without a finished run.
        answers: Its answers on the test split, by seed.
        cost: What it costs; None where that is not known.
        interval: Its difference from the baseline, as it is quoted; None of the baseline.
    """

    validation: float | None
    answers: Mapping[int, Answers]
    cost: TrainingCost | None
    interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which mixer to take, or what is missing to decide it.

    Args:
        verdict: To ``take`` another mixer, to ``keep`` the baseline, or ``undecided``.
        reason: Of a pick, ``alone`` where nothing else was compared, ``cheaper`` than the best,
            ``ahead`` of all that are cheaper, or the ``cheapest``. Undecided, what is missing:
            ``runs``, ``margin``, ``seeds``, ``one_unit``, ``costs``, what `recommend` was told, or
            ``open`` where a cheaper mixer may keep up or not.
        pick: The mixer to take or to keep; None while that is undecided.
        best: The best on validation of the mixers that are no controls.
        subject: The mixer whose difference from the baseline says most: the pick, else the best,
            else the nearest to it, the first of these that is not the baseline.
        interval: The subject's difference from the baseline.
        rival: The cheaper mixer that decides: a pick that is not the best, or one that is open.
        against_best: The rival's difference from the best, on the test split.
        settle: What would settle whether the rival keeps up.
        seeds: The fewest seeds that a mixer has finished.
        margin: How far behind the best a pick may be.
    """

    verdict: Verdict
    reason: str
    pick: str | None = None
    best: str | None = None
    subject: str | None = None
    interval: Interval | None = None
    rival: str | None = None
    against_best: Interval | None = None
    settle: Settle | None = None
    seeds: int = 0
    margin: float | None = None


def recommend(
    candidates: Mapping[str, Candidate],
    *,
    baseline: str,
    margin: float | None,
    score: Score,
    missing: str = "",
) -> Decision:
    """Recommend the cheapest mixer that keeps up with the best.

    The best is chosen on validation, and what is said of it is the test split's. A cheaper mixer
    keeps up if the 95 % interval of its difference from the best stays above -margin, and falls
    behind if it stays below 0. Where none keeps up, the best is taken if all fall behind.

    Args:
        candidates: By label, without controls.
        baseline: The mixer that is kept if no other is taken.
        margin: How far behind the best a mixer may be; None where nothing counts as equal.
        score: The score that models are compared by.
        missing: Why nothing can be decided whatever the scores are; empty where it can.
    """
    known = {
        label: (score.rank(each.validation), each)
        for label, each in candidates.items()
        if each.validation is not None
    }
    if not known:
        return Decision(verdict="undecided", reason=missing or "runs", margin=margin)
    best = max(known, key=lambda label: known[label][0])
    mixers = {label: each for label, (_, each) in known.items()}
    seeds = min(len(each.answers) for each in mixers.values())
    missing = missing or _missing(mixers, best, seeds, margin)
    shared: dict[str, Any] = {"best": best, "seeds": seeds, "margin": margin}
    if missing or margin is None:
        leader = _subject(mixers, (best,), baseline, score)
        return Decision(verdict="undecided", reason=missing, **leader, **shared)

    cheaper = {label for label in mixers if _below(mixers, label, best)}
    found = {
        label: crossed_difference(mixers[label].answers, mixers[best].answers) for label in cheaper
    }
    gains = {label: sorted(map(score.rank, each.ends())) for label, each in found.items() if each}
    keeping = [label for label in gains if gains[label][0] > -margin]
    open_still = [label for label in cheaper if label not in gains or gains[label][1] >= 0]
    rival = _cheapest(mixers, keeping or open_still)
    difference = found[rival] if rival else None
    if difference is not None:
        low, high = bounded(score, *difference.ends())
        shared["against_best"] = Interval(
            n=difference.seeds, difference=difference.mean, low=low, high=high, p=difference.p
        )
    if rival and not keeping:
        if difference is not None:
            shared["settle"] = needed(difference, margin=margin, alpha=1 - LEVEL)
        leader = _subject(mixers, (best,), baseline, score)
        return Decision(verdict="undecided", reason="open", rival=rival, **leader, **shared)
    pick = rival or best
    ahead = "alone" if len(mixers) == 1 else "ahead" if cheaper else "cheapest"
    return Decision(
        verdict="keep" if pick == baseline else "take",
        reason="cheaper" if rival else ahead,
        pick=pick,
        rival=rival,
        **_subject(mixers, (pick, best), baseline, score),
        **shared,
    )


def _missing(mixers: Mapping[str, Candidate], best: str, seeds: int, margin: float | None) -> str:
    """Say what is missing to decide anything; empty if nothing is."""
    if any(each.units < 2 for mixer in mixers.values() for each in mixer.answers.values()):
        return "one_unit"
    if margin is None:
        return "margin"
    if seeds < PROVISIONAL_SEEDS:
        return "seeds"
    return "costs" if len(mixers) > 1 and mixers[best].cost is None else ""


def _subject(
    mixers: Mapping[str, Candidate], first: Sequence[str], baseline: str, score: Score
) -> dict[str, Any]:
    """Return the first that is not the baseline, else the nearest to it, and its difference."""
    named = [label for label in first if label != baseline]
    if not named:
        intervals = {label: each.interval for label, each in mixers.items() if each.interval}
        named = sorted(intervals, key=lambda label: -score.rank(intervals[label].difference))
    return {"subject": named[0], "interval": mixers[named[0]].interval} if named else {}


def _below(mixers: Mapping[str, Candidate], label: str, other: str) -> bool:
    ours, theirs = mixers[label].cost, mixers[other].cost
    return ours is not None and theirs is not None and ours.below(theirs)


def _cheapest(mixers: Mapping[str, Candidate], labels: Sequence[str]) -> str | None:
    """Return the label that the fewest others are cheaper than; None where there is none.

    Overlapping spreads need not be in one order, so that none may be below all others.
    """
    return min(labels, key=lambda x: sum(_below(mixers, y, x) for y in labels), default=None)


def smallest_margin(found: Collection[Crossed], alpha: float = 1 - LEVEL) -> float | None:
    r"""Return the least margin within which half of true ties of this precision would be equal.

    A tie of standard error e is recognised where the estimate, which scatters by e, stays
    :math:`t_{1-\alpha}\,e` inside the margin: in half of all comparisons at
    :math:`(t_{1-\alpha} + z_{0.75})\,e`.

    Args:
        found: Differences whose precision is typical; the median counts.
        alpha: Significance level.
    """
    if not found:
        return None
    each = sorted(_recognised(one, alpha) for one in found)
    return each[len(each) // 2]


def _recognised(found: Crossed, alpha: float) -> float:
    return float(stats.t.ppf(1 - alpha, found.df) + stats.norm.ppf(0.75)) * found.error


TYPICAL_ACCURACY = 0.6
"""Accuracy for which `foreseen_margin` holds; it is smaller for better models."""
_OWN, _REST, _SD = 0.018, 0.29, 0.008


def foreseen_margin(units: int, seeds: int, alpha: float = 1 - LEVEL) -> float:
    r"""Return the least margin that a test split can show, before anything is trained.

    `smallest_margin` of two mixers that are right about 60 % of the test units, as simulated by
    ``benchmarks/certainty.py``: two trainings disagree on about three in ten units, 0.018 of the
    variance is the mixers' own, and accuracy scatters by 0.8 points from one training to the next.

    Args:
        units: Test units.
        seeds: Pairs of runs, two or more.
        alpha: Significance level.
    """
    rest = _REST / (seeds * units)
    of_seeds, of_units = 2 * _SD**2 / seeds + rest, _OWN / units + rest
    found = Crossed(
        mean=0.0,
        seeds=seeds,
        units=units,
        var_seeds=of_seeds,
        var_units=of_units,
        var_rest=rest,
    )
    return _recognised(found, alpha)
