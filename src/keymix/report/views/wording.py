# SPDX-License-Identifier: Apache-2.0
"""How a task's score is called on the page and at the terminal, and the columns of its table."""

from __future__ import annotations

from dataclasses import dataclass

from keymix.data.tasks import CLASSIFICATION, SEGMENTATION
from keymix.report.record import ComparisonRecord
from keymix.task import Task


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The words of a task.

    Args:
        heading: The score as a heading.
        score: The score in a sentence.
        short: The score at the head of a column, or over an axis.
        units: What an interval over the test split is over.
    """

    heading: str
    score: str
    short: str
    units: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of scores.

    Args:
        key: What of an outcome's row it shows, a summary over seeds.
        head: What stands over it.
        percent: Whether it is a fraction, shown in percent; else a distance.
        spread: Whether the standard deviation is shown, too.
    """

    key: str
    head: str
    percent: bool = True
    spread: bool = True


_WORDS = {
    CLASSIFICATION.name: Wording(
        heading="Accuracy", score="accuracy", short="accuracy", units="images"
    ),
    SEGMENTATION.name: Wording(
        heading="Jaccard index", score="mean Jaccard index", short="Jaccard", units="cases"
    ),
}


def wording(task: Task) -> Wording:
    """Return the words of a task."""
    return _WORDS[task.name]


def columns(record: ComparisonRecord) -> list[Column]:
    """List the columns of the table of scores, that of the task's own score first.

    Args:
        record: A comparison's.
    """
    task = record.task_kind
    validation = Column(key=f"val_{task.score.key}", head="validation, %", spread=False)
    if task is CLASSIFICATION:
        told = [Column(key="top1", head="test accuracy, %")]
        if any(row.scores["top5"].mean is not None for row in record.outcome.last):
            told.append(Column(key="top5", head="top-5, %"))
        return [*told, validation]
    return [
        Column(key="jaccard", head="test Jaccard, %"),
        Column(key="weighted_jaccard", head="weighted Jaccard, %"),
        Column(key="dice", head="Dice, %"),
        Column(key="hausdorff_mm", head=f"Hausdorff, {record.hausdorff_unit}", percent=False),
        validation,
    ]
