# SPDX-License-Identifier: Apache-2.0
"""How a task's score is called on the page and at the terminal, and the columns of its table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keymix.data.kinds import IMAGE
from keymix.data.record import DataRecord
from keymix.report.part import page_of
from keymix.report.record import ComparisonRecord
from keymix.task import Score


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The words of a comparison.

    Args:
        heading: The score as a heading.
        score: The score in a sentence.
        short: The score at the head of a column, or over an axis.
        column: The same with its unit.
        changed: What a difference is, at the head of a column.
        differences: The unit of differences in a sentence; empty where there is none.
        up: Which way is better on an axis: ``Up`` or ``Down``.
        inputs: What the images are called.
        units: What an interval over the test split is over.
    """

    heading: str
    score: str
    short: str
    column: str
    changed: str
    differences: str
    up: str
    inputs: str
    units: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of scores.

    Args:
        key: What of an outcome's row it shows, a summary over seeds.
        head: What stands over it.
        score: What kind of number it is.
        spread: Whether the standard deviation is shown, too.
    """

    key: str
    head: str
    score: Score
    spread: bool = True


def unit_of(data: DataRecord) -> str:
    """Return the noun of what chance is of on a test split; an image is called as its kind is."""
    unit = data.task_kind.unit
    return data.kind.noun if unit == IMAGE.noun else unit


def with_unit(text: str, score: Score) -> str:
    """Write a score's unit behind what it is called: ``accuracy, %``."""
    return f"{text}, {score.unit}" if score.unit else text


def wording(record: ComparisonRecord) -> Wording:
    """Return the words of a comparison."""
    task = record.task_kind
    score, page = task.score, page_of(task)
    fraction = score.unit == "%"
    name = score.name
    return Wording(
        heading=page.heading or name[0].upper() + name[1:],
        score=name,
        short=score.label,
        column=with_unit(score.label, score),
        changed=f"difference, {score.difference_unit}".removesuffix(", "),
        differences="percentage points" if fraction else score.unit,
        up="Up" if score.better == "more" else "Down",
        inputs=record.data.kind.nouns,
        units=f"{unit_of(record.data)}s",
    )


def columns(record: ComparisonRecord) -> list[Column]:
    """List the columns of the table of scores, that of the task's own score first.

    Scores that no run has are left out.

    Args:
        record: A comparison's.
    """
    task = record.task_kind
    first, *more = task.scores
    told = [Column(key=first.key, head=with_unit(f"test {first.label}", first), score=first)]
    for score in (*more, *page_of(task).test_scores):
        unit = record.own.values.get(score.unit_key) or score.unit
        known = replace(score, unit=str(unit))
        if any(_has(record, score.key)):
            told.append(Column(key=score.key, head=with_unit(score.label, known), score=known))
    validation = Column(
        key=f"val_{first.key}", head=with_unit("validation", first), score=first, spread=False
    )
    return [*told, validation]


def _has(record: ComparisonRecord, key: str) -> list[bool]:
    found = (row.scores.get(key) for row in record.outcome.last)
    return [summary is not None and summary.mean is not None for summary in found]
