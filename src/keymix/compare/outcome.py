# SPDX-License-Identifier: Apache-2.0
"""From finished runs to the rows of the result: means, paired intervals, verdicts in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from keymix.analysis import statistics
from keymix.analysis.statistics import VERDICT_SEEDS, Interval, Summary
from keymix.compare.verdicts import judge
from keymix.data.tasks import CLASSIFICATION, SEGMENTATION
from keymix.report.record import OutcomeRow
from keymix.task import Task

SUMMARIES = {
    CLASSIFICATION.name: ("top1", "top5", "val_top1"),
    SEGMENTATION.name: ("jaccard", "weighted_jaccard", "dice", "hausdorff_mm", "val_jaccard"),
}
"""What a row tells over seeds, by task: fields of `Scores` or `MaskScores`."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one finished run scored with its weights of one epoch (the last, or the best).

    Args:
        val_top1: Accuracy on the validation split, a fraction.
        top1: Accuracy on the test split.
        top5: Top-5 accuracy on the test split, ``None`` with too few classes.
        correct: Whether each test image was right, in the order of the test split, ``[N]``.
    """

    val_top1: float
    top1: float
    top5: float | None
    correct: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class MaskScores:
    """What one finished run scored where images have masks, with its weights of one epoch.

    Args:
        val_jaccard: Mean Jaccard index on the validation split, a fraction.
        jaccard: That on the test split, as are the rest.
        weighted_jaccard: Each class weighted by its true pixels; None without any.
        dice: Mean Dice coefficient; None without any.
        hausdorff_mm: Mean Hausdorff distance, ``None`` where there is none.
        cases: Pixels of each test case and class, shared, predicted and true, ``[G, K, 3]``.
        scored: Numbers of the classes that count.
    """

    val_jaccard: float
    jaccard: float
    weighted_jaccard: float | None
    dice: float | None
    hausdorff_mm: float | None
    cases: npt.NDArray[np.int64]
    scored: tuple[int, ...]


Runs = Mapping[int, Scores | MaskScores]
"""Scores by seed."""
Table = Mapping[str, Runs]
"""Mixer's label to seed to scores; failed runs are absent."""


def outcome(
    labels: Sequence[str],
    *,
    baseline: str,
    seeds: Sequence[int],
    scores: Table,
    task: Task = CLASSIFICATION,
    classes: Sequence[str] = (),
    narrow: bool = False,
) -> tuple[OutcomeRow, ...]:
    """Compute the rows of the result, one a mixer, in the order given.

    Holm's correction takes each question (seeds, images) as one family over all mixers other than
    the baseline, controls included. Where images have masks, the second is of test cases.

    Args:
        labels: The mixers compared.
        baseline: The one that all others are compared with.
        seeds: The seeds that were asked for.
        scores: What the finished runs scored.
        task: What was learned.
        classes: Names of all classes, which notes tell where images have masks.
        narrow: Whether test images, or cases, belong together, so that the interval over them is
            too narrow.

    Returns:
        The rows; their scores are the task's `SUMMARIES`.
    """
    others = [label for label in labels if label != baseline]
    base = scores.get(baseline, {})
    by_seed = statistics.correct_over_mixers(
        [
            statistics.over_seeds(
                *(_each(runs, task.score.key) for runs in (scores.get(m, {}), base))
            )
            for m in others
        ]
    )
    over_test = partial(_over_cases, classes=classes) if task is SEGMENTATION else _over_images
    by_image = statistics.correct_over_mixers([over_test(scores.get(m, {}), base) for m in others])
    unit = "case" if task is SEGMENTATION else "image"
    compared = dict(zip(others, zip(by_seed, by_image, strict=True), strict=True))
    rows = []
    for label in labels:
        runs = scores.get(label, {})
        row = OutcomeRow(
            mixer=label,
            scores={key: _summary(runs, key) for key in SUMMARIES[task.name]},
            seeds=None,
            images=None,
            verdict=None,
            headline="",
            detail="",
        )
        if label in compared:
            over_seeds, over_images = compared[label]
            judgement = judge(
                label,
                baseline,
                over_seeds,
                over_images,
                planned=len(seeds),
                unit=unit,
                narrow=narrow,
            )
            row = replace(
                row,
                seeds=over_seeds,
                images=over_images,
                verdict=judgement.verdict,
                headline=judgement.headline,
                detail=judgement.detail,
            )
        rows.append(row)
    return tuple(rows)


def lead(rows: Sequence[OutcomeRow], *, baseline: str, task: Task = CLASSIFICATION) -> str:
    """Say where the baseline stands and which mixers are ahead or behind."""
    base = next(row for row in rows if row.mixer == baseline).scores[task.score.key]
    if base.mean is None:
        return f"No run of the baseline {baseline} finished, so there is nothing to compare with."
    spread = "" if base.sd is None else f" ± {base.sd * 100:.1f}"
    runs = "one seed" if base.n == 1 else f"{base.n} seeds"
    share = f"{base.mean * 100:.1f}{spread}\u00a0%"
    if task is CLASSIFICATION:
        told = f"gets {share} of the test images right"
    else:
        told = f"reaches a {task.score.name} of {share} on the test images"
    text = f"The baseline {baseline} {told} ({runs})."
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


def caution(seeds: int, *, task: Task = CLASSIFICATION) -> str:
    """Say what too few seeds leave open, and the remedy; empty from five seeds up."""
    if seeds >= VERDICT_SEEDS:
        return ""
    count = "One seed" if seeds == 1 else f"{seeds} seeds"
    verb = "allows" if seeds == 1 else "allow"
    score = task.score.name if task is CLASSIFICATION else f"the {task.score.name}"
    return (
        f"{count} {verb} no verdict: how much {score} changes from one training to the next "
        f"is hardly known. Run the same command with --seeds {VERDICT_SEEDS} for one; "
        "finished runs are kept."
    )


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _each(runs: Runs, key: str) -> dict[int, Any]:
    return {seed: getattr(s, key) for seed, s in runs.items()}


def _summary(runs: Runs, key: str) -> Summary:
    known = [value for value in _each(runs, key).values() if value is not None]
    return statistics.summarize(known)


def _over_images(runs: Runs, base: Runs) -> Interval | None:
    return statistics.over_images(_each(runs, "correct"), _each(base, "correct"))


def _over_cases(runs: Runs, base: Runs, *, classes: Sequence[str]) -> Interval | None:
    scored = next((s.scored for s in base.values() if isinstance(s, MaskScores)), ())
    return statistics.over_cases(
        _each(runs, "cases"), _each(base, "cases"), scored, classes=classes
    )
