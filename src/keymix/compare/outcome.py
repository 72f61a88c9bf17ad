# SPDX-License-Identifier: Apache-2.0
"""From finished runs to the rows of the result: means, paired intervals, how certain they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from keymix.analysis import statistics
from keymix.analysis.answers import Answers
from keymix.analysis.certainty import (
    CLEAR_SEEDS,
    MARGIN,
    PROVISIONAL_SEEDS,
    Certainty,
    Evidence,
    Settle,
    judge,
)
from keymix.analysis.statistics import FEW_CASES, LEVEL, Interval, Summary
from keymix.report.formats import listing, span
from keymix.report.part import page_of
from keymix.report.record import OutcomeRow
from keymix.task import FRACTION, Score, Task
from keymix.train.parts import answers_of


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one finished run scored with its weights of one epoch (the last, or the best)."""

    val: float | None  # the score that models are compared by, on the validation split
    test: Mapping[str, float | None]  # by key, None where one is not defined
    answers: Answers  # on the test split


Runs = Mapping[int, Scores]
"""Scores by seed."""
Table = Mapping[str, Runs]
"""Mixer's label to seed to scores; failed runs are absent."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What decides how certain a difference is."""

    alpha: float = 1 - LEVEL  # significance level of this look at the comparison
    margin: float | None = MARGIN  # differences up to this are equal; None where none is
    narrow: bool = False  # whether test units belong together, so that intervals are too narrow
    controls: Collection[str] = ()  # labels of the mixers that are tested by themselves
    references: Collection[str] = ()  # ... of the models that are outside every test


def outcome(
    labels: Sequence[str],
    *,
    baseline: str,
    seeds: Sequence[int],
    scores: Table,
    task: Task,
    unit: str = "",
    rules: Rules = Rules(),  # frozen
) -> tuple[OutcomeRow, ...]:
    """Compute the rows of the result, one per mixer, in the order given.

    The rows have the task's scores on the test split, and that on validation. `unit` is what the
    units of the test split are called, where the task does not say.
    """
    task = replace(task, unit=unit or task.unit)
    score = task.score
    evidence = _evidence(labels, baseline, scores, task, rules)
    tested = {label: each for label, each in evidence.items() if label not in rules.references}
    certain = judge(
        tested, alpha=rules.alpha, margin=rules.margin, score=score, narrow=rules.narrow
    )
    keys = [each.key for each in (*task.scores, *page_of(task).test_scores)]
    rows = []
    for label in labels:
        runs, found = scores.get(label, {}), evidence.get(label)
        words = Words(mixer=label, baseline=baseline, planned=len(seeds), score=score, task=task)
        judged = certain.get(label)
        shown = headline(words, judged, rules) if judged is not None else ""
        rows.append(
            OutcomeRow(
                mixer=label,
                scores={
                    **{key: _summary([run.test.get(key) for run in runs.values()]) for key in keys},
                    f"val_{score.key}": _summary([run.val for run in runs.values()]),
                },
                seeds=None if found is None else found.seeds,
                images=None if found is None else found.units,
                interval=None if judged is None else judged.interval,
                degree=None if judged is None else judged.degree,
                direction=None if judged is None else judged.direction,
                settle=None if judged is None else judged.settle,
                headline=shown,
                detail="" if found is None or judged is None else detail(words, found, rules),
            )
        )
    return tuple(rows)


def _evidence(
    labels: Sequence[str], baseline: str, scores: Table, task: Task, rules: Rules
) -> dict[str, Evidence]:
    """Compare every mixer with the baseline; Holm's correction is over the named ones."""
    others = [label for label in labels if label != baseline]
    part, base = answers_of(task), scores.get(baseline, {})
    seeds = {
        label: statistics.over_seeds(
            *(_by_seed(runs, task.score.key) for runs in (scores.get(label, {}), base)),
            score=task.score,
        )
        for label in others
    }
    units = {
        label: part.interval(task, _answers(scores.get(label, {})), _answers(base))
        for label in others
    }
    named = [m for m in others if m not in rules.controls and m not in rules.references]
    for table in (seeds, units):
        corrected = statistics.correct_over_mixers([table[label] for label in named])
        table.update(zip(named, corrected, strict=True))
    return {
        label: Evidence(
            crossed=_crossed(scores.get(label, {}), base, units[label]),
            by_seed=_differences(scores.get(label, {}), base, task.score.key),
            seeds=seeds[label],
            units=units[label],
            control=label in rules.controls,
        )
        for label in others
    }


def _crossed(runs: Runs, base: Runs, units: Interval | None) -> statistics.Crossed | None:
    """The crossed difference; None where an interval over units alone is not defined either."""
    if units is None or units.low is None:
        return None
    return statistics.crossed_difference(_answers(runs), _answers(base))


def _differences(runs: Runs, base: Runs, key: str) -> tuple[float, ...]:
    ours, theirs = _by_seed(runs, key), _by_seed(base, key)
    return tuple(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))


def lead(rows: Sequence[OutcomeRow], *, baseline: str, task: Task, inputs: str = "images") -> str:
    """Say what the baseline reaches and which mixers are ahead, behind or equal."""
    score = task.score
    base = next(row for row in rows if row.mixer == baseline).scores[score.key]
    if base.mean is None:
        return f"No run of the baseline {baseline} finished, so there is nothing to compare with."
    spread = "" if base.sd is None else f" ± {score.digits(base.sd)}"
    runs = "one seed" if base.n == 1 else f"{base.n} seeds"
    share = f"{score.digits(base.mean)}{spread}"
    share = f"{share}\u00a0{score.unit}" if score.unit else share
    page = page_of(task)
    article = "an" if score.name[0] in "aeiou" else "a"
    reaches = page.reaches if page.reaches and score.key == page.reaches_key else ""
    reaches = reaches or f"reaches {article} {score.name} of {{score}} on the test {{inputs}}"
    text = f"The baseline {baseline} {reaches.format(score=share, inputs=inputs)} ({runs})."
    for degree, tail in (("clear", ""), ("provisional", ", provisionally")):
        for word in ("better", "worse"):
            names = [r.mixer for r in rows if (r.degree, r.direction) == (degree, word)]
            if names:
                verb = "does" if len(names) == 1 else "do"
                text += f" {listing(names)} {verb} {word}{tail}."
    equal = [row.mixer for row in rows if row.degree == "equal"]
    if equal:
        verb = "is" if len(equal) == 1 else "are"
        text += f" {listing(equal)} {verb} equal to it within the margin."
    unclear = [row.mixer for row in rows if row.degree == "unclear"]
    if unclear and len(unclear) < len(rows) - 1:
        text += f" Unclear: {listing(unclear)}."
    elif unclear:
        text += " No mixer is distinguishable from it."
    return text


def caution(seeds: int, *, task: Task) -> str:
    """Say what too few seeds leave open; empty from five seeds up."""
    if seeds >= CLEAR_SEEDS:
        return ""
    score = page_of(task).phrase or f"the {task.score.name}"
    if seeds >= PROVISIONAL_SEEDS:
        return (
            f"With {seeds} seeds a difference is provisional at best, and none can be shown to be "
            "absent."
        )
    count = "One seed says" if seeds == 1 else f"{seeds} seeds say"
    return f"{count} little of how {score} changes from one training to the next."


def _by_seed(runs: Runs, key: str) -> dict[int, float]:
    found = {seed: run.test[key] for seed, run in runs.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _answers(runs: Runs) -> dict[int, Answers]:
    return {seed: run.answers for seed, run in runs.items()}


def _summary(values: Sequence[float | None]) -> Summary:
    return statistics.summarize([value for value in values if value is not None])


# ---- in words -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the sentences on a mixer need; `planned` are the seeds that were asked for."""

    mixer: str
    baseline: str
    planned: int
    score: Score = FRACTION
    task: Task

    def seeds(self, done: int) -> str:
        """Say how many seeds there are: ``3 seeds``, or ``2 seeds of 3``."""
        count = "1 seed" if done == 1 else f"{done} seeds"
        return count if done >= self.planned else f"{count} of {self.planned}"


def headline(words: Words, found: Certainty, rules: Rules) -> str:
    """Say in one sentence how a mixer compares with the baseline, and how certain that is."""
    mixer, baseline, score = words.mixer, words.baseline, words.score
    interval = found.interval
    if interval is None:
        return f"{mixer}: nothing can be said, no seed finished for both it and {baseline}."
    seeds = words.seeds(interval.n)
    level = f"{100 * interval.level:.4g}\u00a0%: "
    ends = span(interval.low, interval.high, score)
    within = f"{level}{ends}" if interval.low is not None else "no interval"
    if found.direction is not None:
        size = score.changed(interval.difference, sign=False)
        text = f"{mixer} is {found.direction} than {baseline} by {size} ({within}; {seeds})"
        return f"{text}." if found.degree == "clear" else f"{text}: provisional."
    if found.degree == "equal":
        assert rules.margin is not None
        margin = score.changed(rules.margin, sign=False)
        return f"{mixer} equals {baseline} within {margin} ({within}; {seeds})."
    shown = f"{score.changed(interval.difference)}, {within}; {seeds}"
    text = f"{mixer} is not distinguishable from {baseline} here ({shown})"
    if rules.narrow:
        return f"{text}: {words.task.unit}s that belong together make the interval too narrow."
    if interval.low is not None and interval.high is not None and interval.low * interval.high > 0:
        word = "better" if score.ahead(interval.difference) else "worse"
        size = score.changed(interval.difference, sign=False)
        shown = f"{within}; {seeds}"
        text = f"{mixer} is {word} than {baseline} by {size} here, which is unclear ({shown})"
    settled = what_settles(found.settle, interval, words.task.unit) if found.settle else ""
    return f"{text}. {settled}" if settled else f"{text}."


def what_settles(settle: Settle, interval: Interval, unit: str) -> str:
    """Say how many seeds, or test units at enough seeds, would settle an unclear difference."""
    seeds, units = settle.seeds, settle.units
    if interval.n < 2:
        return f"At least {CLEAR_SEEDS} seeds would settle it."
    ways = [] if seeds is None else [f"{_span(seeds)} seeds"]
    if units is not None and (seeds is None or interval.n >= CLEAR_SEEDS):
        more = f" and {CLEAR_SEEDS} seeds" if interval.n < CLEAR_SEEDS else ""
        ways.append(f"{_span(units)} test {unit}s{more}")
    if not ways:
        return f"Neither more seeds nor more test {unit}s are likely to settle it."
    return f"{' or '.join(ways).capitalize()} would settle it."


def _span(found: tuple[int, int | None]) -> str:
    low, high = found
    if high is None:
        return f"{low:,} or more"
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def detail(words: Words, found: Evidence, rules: Rules) -> str:
    """Say what each of the two questions alone gives: over seeds, over test units."""
    score, unit = words.score, words.task.unit
    parts = []
    if found.seeds is not None:
        seeds = found.seeds
        ends = seeds.note if seeds.low is None else f"{_ends(seeds, score)}{_holm(seeds)}"
        note = f"; {seeds.note}" if seeds.low is not None and seeds.note else ""
        parts.append(f"On these test {unit}s, trained again: {ends}{note}.")
    if found.units is not None:
        units = found.units
        ends = units.note if units.low is None else f"{_ends(units, score)}{_holm(units)}"
        rough = f"; few {unit}s, so it is rough" if units.n < FEW_CASES else ""
        narrow = f"; too narrow, as {unit}s belong together" if rules.narrow else ""
        parts.append(f"These models, on other {unit}s: {ends}{rough}{narrow}.")
    return " ".join(parts)


def _ends(interval: Interval, score: Score) -> str:
    return span(interval.low, interval.high, score)


def _holm(interval: Interval) -> str:
    p = interval.p_holm
    if p is None:
        return ""
    text = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    return f", Holm-corrected {text}"
