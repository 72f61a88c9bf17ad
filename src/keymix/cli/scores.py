# SPDX-License-Identifier: Apache-2.0
"""The scores of an evaluation as cells of a table, by task, and what else the task records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.task import LOSS, Score, Task

if TYPE_CHECKING:
    from keymix.train.record import SplitScores


def heads(task: Task) -> list[str]:
    """Name the columns of a task's scores."""
    own = [f"{score.short} {score.unit}".rstrip() for score in task.scores]
    return [LOSS, *own] if task.validation_loss else own


def cells(scores: Mapping[str, float | None], task: Task) -> list[str]:
    """Write a task's scores: the loss, fractions in percent, others without their unit."""
    own = [cell(scores.get(score.key), score) for score in task.scores]
    return [f"{scores[LOSS]:.4f}", *own] if task.validation_loss else own


def cell(value: float | None, score: Score) -> str:
    """Write a score without its unit; a dash where there is none."""
    return "–" if value is None else score.digits(value, 2)


def print_details(test: SplitScores, task: Task, what: str) -> None:
    """Print what a task records next to the scores, such as those of each class, under a title."""
    from keymix.train.parts import answers_of

    for table in answers_of(task).details(test):
        rows = [list(row) for row in table.rows]
        console.table(list(table.heads), rows, left=1, title=f"{table.title}, {what}")
        if table.note:
            console.note(table.note)
