# SPDX-License-Identifier: Apache-2.0
"""The scores of an evaluation as cells of a table, by task, and those of each class of masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.data.tasks import SEGMENTATION
from keymix.task import Task

if TYPE_CHECKING:
    from keymix.train.record import SplitScores

_HEADS = {
    "loss": "loss",
    "top1": "top1 %",
    "top5": "top5 %",
    "jaccard": "Jaccard %",
    "weighted_jaccard": "weighted %",
    "dice": "Dice %",
}


def heads(kind: Task) -> list[str]:
    """Name the columns of a task's scores."""
    return [_HEADS[name] for name in kind.keys]


def cells(scores: Mapping[str, float | None], kind: Task) -> list[str]:
    """Write a task's scores: the loss, and fractions in percent."""
    return [
        f"{scores[name]:.4f}" if name == "loss" else percent(scores[name]) for name in kind.keys
    ]


def percent(value: float | None) -> str:
    """Write a fraction in percent; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.2f}"


def tell_classes(test: SplitScores, kind: Task, what: str) -> None:
    """Print the scores of each class of masks; nothing for another task.

    Args:
        test: What was scored.
        kind: The task.
        what: Whose they are, for the title.
    """
    if kind is not SEGMENTATION:
        return
    rows = [
        [
            each.name,
            percent(each.jaccard),
            percent(each.dice),
            distance(each.hausdorff_mm),
            str(each.missed),
        ]
        for each in test.classes or ()
    ]
    overall = [percent(test.scores["jaccard"]), percent(test.scores["dice"])]
    overall += [distance(test.hausdorff_mm), str(test.hausdorff_missed)]
    rows.append(["all", *overall])
    columns = ["class", "Jaccard %", "Dice %", f"Hausdorff {test.hausdorff_unit}", "in one alone"]
    console.table(columns, rows, left=1, title=f"each class, {what}")
    console.note(
        "Hausdorff is a mean over the images where truth and prediction both have the class; "
        "'in one alone' counts those where only one has it."
    )


def distance(value: float | None) -> str:
    """Write a distance; a dash where there is none."""
    return "–" if value is None else f"{value:.1f}"
