# SPDX-License-Identifier: Apache-2.0
"""From finished runs to the rows of the result: means, paired intervals, verdicts in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keymix.analysis import statistics
from keymix.analysis.answers import Answers
from keymix.analysis.statistics import (
    FEW_CASES,
    LEVEL,
    VERDICT_SEEDS,
    Interval,
    Summary,
    Verdict,
)
from keymix.report.formats import listing
from keymix.report.part import page_of
from keymix.report.record import OutcomeRow
from keymix.task import FRACTION, Score, Task
from keymix.train.parts import answers_of

_ALPHA = 1 - LEVEL


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one finished run scored with its weights of one epoch (the last, or the best)."""

    val: float  # the score that models are compared by, on the validation split
    test: Mapping[str, float | None]  # by key, None where one is not defined
    answers: Answers  # on the test split


Runs = Mapping[int, Scores]
"""Scores by seed."""
Table = Mapping[str, Runs]
"""Mixer's label to seed to scores; failed runs are absent."""


def outcome(
    labels: Sequence[str],
    *,
    baseline: str,
    seeds: Sequence[int],
    scores: Table,
    task: Task,
    unit: str = "",
    narrow: bool = False,
) -> tuple[OutcomeRow, ...]:
    """Compute the rows of the result, one per mixer, in the order given.

    Holm's correction takes each question (seeds, units) as one family over all mixers other than
    the baseline, controls included. The rows have the task's scores on the test split, and that on
    validation. `unit` is what the units of the test split are called, where the task does not say;
    they are `narrow` if they belong together, so that the interval over them is too narrow.
    """
    task = replace(task, unit=unit or task.unit)
    score, part = task.score, answers_of(task)
    others = [label for label in labels if label != baseline]
    base = scores.get(baseline, {})
    by_seed = statistics.correct_over_mixers(
        [
            statistics.over_seeds(
                *(_by_seed(runs, score.key) for runs in (scores.get(m, {}), base))
            )
            for m in others
        ]
    )
    by_unit = statistics.correct_over_mixers(
        [part.interval(task, _answers(scores.get(m, {})), _answers(base)) for m in others]
    )
    compared = dict(zip(others, zip(by_seed, by_unit, strict=True), strict=True))
    keys = [each.key for each in (*task.scores, *page_of(task).test_scores)]
    rows = []
    for label in labels:
        runs = scores.get(label, {})
        over_seeds, over_units = compared.get(label, (None, None))
        judgement = None
        if label != baseline:
            judgement = judge(
                label,
                baseline,
                over_seeds,
                over_units,
                planned=len(seeds),
                score=score,
                unit=task.unit,
                narrow=narrow,
            )
        rows.append(
            OutcomeRow(
                mixer=label,
                scores={
                    **{key: _summary([run.test.get(key) for run in runs.values()]) for key in keys},
                    f"val_{score.key}": _summary([run.val for run in runs.values()]),
                },
                seeds=over_seeds,
                images=over_units,
                verdict=judgement.verdict if judgement else None,
                headline=judgement.headline if judgement else "",
                detail=judgement.detail if judgement else "",
            )
        )
    return tuple(rows)


def lead(rows: Sequence[OutcomeRow], *, baseline: str, task: Task, inputs: str = "images") -> str:
    """Say what the baseline reaches and which mixers are ahead or behind."""
    score = task.score
    base = next(row for row in rows if row.mixer == baseline).scores[score.key]
    if base.mean is None:
        return f"No run of the baseline {baseline} finished, so there is nothing to compare with."
    spread = "" if base.sd is None else f" ± {score.digits(base.sd)}"
    runs = "one seed" if base.n == 1 else f"{base.n} seeds"
    share = f"{score.digits(base.mean)}{spread}"
    share = f"{share}\u00a0{score.unit}" if score.unit else share
    article = "an" if score.name[0] in "aeiou" else "a"
    reaches = page_of(task).reaches or (
        f"reaches {article} {score.name} of {{score}} on the test {{inputs}}"
    )
    text = f"The baseline {baseline} {reaches.format(score=share, inputs=inputs)} ({runs})."
    for word in ("better", "worse"):
        names = [row.mixer for row in rows if row.verdict == word]
        if names:
            verb = "does" if len(names) == 1 else "do"
            text += f" {listing(names)} {verb} {word}."
    if any(row.verdict not in (None, "no verdict") for row in rows):
        unclear = [row.mixer for row in rows if row.verdict == "no difference shown"]
        if unclear:
            text += f" No difference is shown for {listing(unclear)}."
    return text


def caution(seeds: int, *, task: Task) -> str:
    """Say what too few seeds leave open, and the remedy; empty from five seeds up."""
    if seeds >= VERDICT_SEEDS:
        return ""
    count = "One seed" if seeds == 1 else f"{seeds} seeds"
    verb = "allows" if seeds == 1 else "allow"
    score = page_of(task).phrase or f"the {task.score.name}"
    return (
        f"{count} {verb} no verdict: how much {score} changes from one training to the next "
        f"is hardly known. Run the same command with --seeds {VERDICT_SEEDS} for one; "
        "finished runs are kept."
    )


def _by_seed(runs: Runs, key: str) -> dict[int, float]:
    found = {seed: run.test[key] for seed, run in runs.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _answers(runs: Runs) -> dict[int, Answers]:
    return {seed: run.answers for seed, run in runs.items()}


def _summary(values: Sequence[float | None]) -> Summary:
    return statistics.summarize([value for value in values if value is not None])


# ---- verdicts -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict and the sentences that go with it.

    Attributes:
        verdict: ``better``, ``worse`` or ``no difference shown`` from five pairs of runs up, else
            ``no verdict``.
        headline: One sentence that can be read alone.
        detail: The evidence of both questions, one or two sentences.
    """

    verdict: Verdict
    headline: str
    detail: str


def span(interval: Interval, score: Score) -> str:
    """Write an interval's ends, e.g. ``−0.4 to +1.2``."""
    if interval.low is None or interval.high is None:
        return "no interval"
    return f"{score.change(interval.low)} to {score.change(interval.high)}"


def _p(value: float) -> str:
    return (
        "p < 0.001" if value < 0.001 else f"p = {value:.3f}" if value < 0.1 else f"p = {value:.2f}"
    )


def _clear(interval: Interval | None) -> bool:
    return interval is not None and interval.p_holm is not None and interval.p_holm < _ALPHA


def _direction(score: Score, difference: float) -> Literal["better", "worse"]:
    return "better" if score.ahead(difference) else "worse"


def _units_sentence(units: Interval | None, score: Score, unit: str, *, narrow: bool) -> str:
    if units is None:
        return f"There is no pair of runs to compare {unit} by {unit}."
    over = f"the {units.n} test {unit}s" if units.n > 1 else f"the one test {unit}"
    text = f"Over {over} the difference is {score.changed(units.difference)}"
    if units.low is None:
        return f"{text}: {units.note}."
    rough = f"; few {unit}s, so it is rough" if units.n < FEW_CASES else ""
    too = f"; too narrow, as {unit}s belong together" if narrow else ""
    text += f" (95\u00a0% interval {span(units, score)}{rough}{too})"
    if narrow:
        return f"{text}."
    if _clear(units):
        return f"{text}, more than the choice of {unit}s explains."
    if units.low is not None and units.high is not None and units.low * units.high > 0:
        return (
            f"{text}; the interval leaves out zero by itself, but not after correction for the "
            "number of mixers."
        )
    return f"{text}, which the choice of {unit}s alone could explain."


def _seeds_sentence(seeds: Interval, score: Score) -> str:
    text = f"Over {seeds.n} seeds the difference is {score.changed(seeds.difference)}"
    if seeds.low is None or seeds.p_holm is None:
        return f"{text}: {seeds.note}."
    text += f" (95\u00a0% interval {span(seeds, score)}, Holm-corrected {_p(seeds.p_holm)})"
    if seeds.note:
        text += f"; {seeds.note}"
    return f"{text}."


def judge(
    mixer: str,
    baseline: str,
    seeds: Interval | None,
    images: Interval | None,
    *,
    planned: int,
    score: Score = FRACTION,
    unit: str = "image",
    narrow: bool = False,
) -> Judgement:
    """Say in words how a mixer compares with the baseline.

    A mixer is called better or worse when both questions agree after Holm's correction: it would
    hold if retrained, and on more images. Below five pairs of runs no verdict is given.

    Args:
        mixer: The mixer's label.
        baseline: The baseline's label.
        seeds: The paired difference over seeds, ``None`` if no pair of runs finished.
        images: The paired difference over the units of the test split.
        planned: Seeds that the comparison asked for.
        score: The score of which these are differences.
        unit: What the units are, such as ``image`` or ``case``.
        narrow: Whether these belong together, so that the interval over them is too narrow.
    """
    if seeds is None:
        return Judgement(
            verdict="no verdict",
            headline=f"{mixer}: nothing can be said, no seed finished for both it and {baseline}.",
            detail="",
        )
    about = _units_sentence(images, score, unit, narrow=narrow)
    if seeds.n < VERDICT_SEEDS:
        trusted = None if narrow else images
        return _no_verdict(
            mixer, baseline, seeds, trusted, planned=planned, score=score, about=about
        )
    both = f"{_seeds_sentence(seeds, score)} {about}"
    retrained, more_units = _clear(seeds), _clear(images) and not narrow
    agree = images is not None and seeds.difference * images.difference > 0
    if retrained and more_units and agree:
        word = _direction(score, seeds.difference)
        size = score.changed(seeds.difference, sign=False)
        return Judgement(
            verdict=word,
            headline=f"{mixer} is {word} than {baseline} by {size}.",
            detail=both,
        )
    if retrained:
        why = (
            f"retrained models would again be {_direction(score, seeds.difference)} on these test "
            f"{unit}s, but other test {unit}s might not show it"
        )
    elif more_units and images is not None:
        why = (
            f"these trained models are {_direction(score, images.difference)}, but models trained "
            "again might not be"
        )
    elif seeds.low is not None and seeds.high is not None:
        why = f"it may be anywhere from {span(seeds, score)} {score.difference_unit}".rstrip()
    else:
        why = "the seeds do not vary"
    return Judgement(
        verdict="no difference shown",
        headline=f"No difference shown between {mixer} and {baseline}: {why}.",
        detail=both,
    )


def _no_verdict(
    mixer: str,
    baseline: str,
    seeds: Interval,
    images: Interval | None,
    *,
    planned: int,
    score: Score,
    about: str,
) -> Judgement:
    count = "1 seed" if seeds.n == 1 else f"{seeds.n} seeds"
    if seeds.n < planned:
        count += f" of {planned} finished"
    if _clear(images) and images is not None:
        headline = (
            f"{mixer}, as trained here, is {_direction(score, images.difference)} than {baseline} "
            f"by {score.changed(images.difference, sign=False)}; whether it would hold if "
            f"retrained cannot be said ({count})."
        )
    else:
        headline = (
            f"{mixer} is not distinguishable from {baseline} here "
            f"({score.changed(seeds.difference)}, {count})."
        )
    seeds_text = f"{count}: whether it would hold if retrained cannot be said"
    if seeds.low is not None:
        seeds_text += f" (the interval over seeds, {span(seeds, score)}, of too few)"
    seeds_text += "."
    if seeds.note and "one seed has" not in seeds.note:
        seeds_text += f" Note: {seeds.note}."
    return Judgement(
        verdict="no verdict",
        headline=headline,
        detail=f"{seeds_text} {about}",
    )
