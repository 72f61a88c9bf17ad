# SPDX-License-Identifier: Apache-2.0
"""From finished runs to the rows of the result: means, paired intervals, verdicts in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keymix.analysis import statistics
from keymix.analysis.answers import Answers
from keymix.analysis.statistics import VERDICT_SEEDS, Summary
from keymix.compare.verdicts import judge
from keymix.report.part import page_of
from keymix.report.record import OutcomeRow
from keymix.task import Task


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one finished run scored with its weights of one epoch (the last, or the best).

    Args:
        val: The score that models are compared by, on the validation split.
        test: Scores on the test split by key, None where one is not defined.
        answers: What the model answered on the test split.
    """

    val: float
    test: Mapping[str, float | None]
    answers: Answers


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
    """Compute the rows of the result, one a mixer, in the order given.

    Holm's correction takes each question (seeds, units) as one family over all mixers other than
    the baseline, controls included.

    Args:
        labels: The mixers compared.
        baseline: The one that all others are compared with.
        seeds: The seeds that were asked for.
        scores: What the finished runs scored.
        task: What was learned.
        unit: What the units of the test split are called; as the task calls them, if empty.
        narrow: Whether units belong together, so that the interval over them is too narrow.

    Returns:
        The rows; their scores are the task's on the test split, and that on validation.
    """
    from keymix.train.parts import answers_of

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
        row = OutcomeRow(
            mixer=label,
            scores={
                **{key: _summary([run.test.get(key) for run in runs.values()]) for key in keys},
                f"val_{score.key}": _summary([run.val for run in runs.values()]),
            },
            seeds=None,
            images=None,
            verdict=None,
            headline="",
            detail="",
        )
        if label in compared:
            over_seeds, over_units = compared[label]
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
            row = replace(
                row,
                seeds=over_seeds,
                images=over_units,
                verdict=judgement.verdict,
                headline=judgement.headline,
                detail=judgement.detail,
            )
        rows.append(row)
    return tuple(rows)


def lead(rows: Sequence[OutcomeRow], *, baseline: str, task: Task, inputs: str = "images") -> str:
    """Say where the baseline stands and which mixers are ahead or behind.

    Args:
        rows: The rows of the result.
        baseline: The mixer that the others are compared with.
        task: What was learned.
        inputs: What the images are called.
    """
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
            text += f" {_listing(names)} {verb} {word}."
    if any(row.verdict not in (None, "no verdict") for row in rows):
        unclear = [row.mixer for row in rows if row.verdict == "no difference shown"]
        if unclear:
            text += f" No difference is shown for {_listing(unclear)}."
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


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _by_seed(runs: Runs, key: str) -> dict[int, float]:
    found = {seed: run.test[key] for seed, run in runs.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _answers(runs: Runs) -> dict[int, Answers]:
    return {seed: run.answers for seed, run in runs.items()}


def _summary(values: Sequence[float | None]) -> Summary:
    return statistics.summarize([value for value in values if value is not None])
