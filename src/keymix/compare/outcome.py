# SPDX-License-Identifier: Apache-2.0
"""From finished runs to the rows of the result: means, paired intervals, verdicts in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from keymix.compare import statistics
from keymix.compare.statistics import VERDICT_SEEDS
from keymix.compare.verdicts import judge

Which = Literal["last", "best"]


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


Table = Mapping[str, Mapping[int, Scores]]
"""Mixer's label to seed to scores; failed runs are absent."""


def outcome(
    labels: Sequence[str], *, baseline: str, seeds: Sequence[int], scores: Table
) -> list[dict[str, Any]]:
    """Compute the rows of the result, one a mixer, in the order given.

    Holm's correction takes each question (seeds, images) as one family over all mixers other than
    the baseline, controls included.

    Args:
        labels: The mixers compared.
        baseline: The one that all others are compared with.
        seeds: The seeds that were asked for.
        scores: What the finished runs scored.

    Returns:
        Plain rows: ``mixer, top1, top5, val_top1`` (n, mean, sd), ``seeds, images`` (intervals or
        ``None``), ``verdict, headline, detail``.
    """
    others = [label for label in labels if label != baseline]
    base = scores.get(baseline, {})
    by_seed = statistics.correct_over_mixers(
        [statistics.over_seeds(_top1(scores.get(m, {})), _top1(base)) for m in others]
    )
    by_image = statistics.correct_over_mixers(
        [statistics.over_images(_correct(scores.get(m, {})), _correct(base)) for m in others]
    )
    compared = dict(zip(others, zip(by_seed, by_image, strict=True), strict=True))
    rows = []
    for label in labels:
        runs = scores.get(label, {})
        top5 = [s.top5 for s in runs.values() if s.top5 is not None]
        row: dict[str, Any] = {
            "mixer": label,
            "top1": asdict(statistics.summarize([s.top1 for s in runs.values()])),
            "top5": asdict(statistics.summarize(top5)),
            "val_top1": asdict(statistics.summarize([s.val_top1 for s in runs.values()])),
            "seeds": None,
            "images": None,
            "verdict": None,
            "headline": "",
            "detail": "",
        }
        if label in compared:
            over_seeds, over_images = compared[label]
            judgement = judge(label, baseline, over_seeds, over_images, planned=len(seeds))
            row["seeds"] = over_seeds.to_dict() if over_seeds else None
            row["images"] = over_images.to_dict() if over_images else None
            row |= asdict(judgement)
        rows.append(row)
    return rows


def lead(rows: Sequence[Mapping[str, Any]], *, baseline: str) -> str:
    """Say where the baseline stands and which mixers are ahead or behind."""
    base = next(row for row in rows if row["mixer"] == baseline)
    if base["top1"]["mean"] is None:
        return f"No run of the baseline {baseline} finished, so there is nothing to compare with."
    spread = "" if base["top1"]["sd"] is None else f" ± {base['top1']['sd'] * 100:.1f}"
    n = base["top1"]["n"]
    runs = "one seed" if n == 1 else f"{n} seeds"
    text = (
        f"The baseline {baseline} gets {base['top1']['mean'] * 100:.1f}{spread}\u00a0% of the test "
        f"images right ({runs})."
    )
    for word in ("better", "worse"):
        names = [row["mixer"] for row in rows if row["verdict"] == word]
        if names:
            verb = "does" if len(names) == 1 else "do"
            text += f" {_listing(names)} {verb} {word}."
    if any(row["verdict"] not in (None, "no verdict") for row in rows):
        unclear = [row["mixer"] for row in rows if row["verdict"] == "no difference shown"]
        if unclear:
            text += f" No difference is shown for {_listing(unclear)}."
    return text


def caution(seeds: int) -> str:
    """Say what too few seeds leave open, and the remedy; empty from five seeds up."""
    if seeds >= VERDICT_SEEDS:
        return ""
    count = "One seed" if seeds == 1 else f"{seeds} seeds"
    verb = "allows" if seeds == 1 else "allow"
    return (
        f"{count} {verb} no verdict: how much accuracy changes from one training to the next "
        f"is hardly known. Run the same command with --seeds {VERDICT_SEEDS} for one; "
        "finished runs are kept."
    )


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _top1(runs: Mapping[int, Scores]) -> dict[int, float]:
    return {seed: s.top1 for seed, s in runs.items()}


def _correct(runs: Mapping[int, Scores]) -> dict[int, npt.NDArray[np.bool_]]:
    return {seed: s.correct for seed, s in runs.items()}
