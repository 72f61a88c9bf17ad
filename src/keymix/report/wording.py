# SPDX-License-Identifier: Apache-2.0
"""How a comparison's scores and counts are called on the page and at the terminal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keymix.data.kinds import IMAGE
from keymix.data.record import DataRecord
from keymix.report.part import page_of
from keymix.report.record import Results
from keymix.task import Score

STATUS = {"done": "finished", "failed": "failed", "missing": "not finished"}
"""A run's state in words."""


_CONTROLS = {"identity": "no mixing at all"}
"""Controls that people know by what they do."""


def control_name(label: str) -> str:
    """Name a control by what it is: ``no mixing at all (identity)``, ``the control random``."""
    return f"{_CONTROLS[label]} ({label})" if label in _CONTROLS else f"the control {label}"


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The words of a comparison.

    The score is `heading` as a heading, `score` in a sentence, `short` over an axis or a column,
    `column` with its unit; a difference is `changed` over a column and has the unit `differences`
    in a sentence, empty where there is none. `up` is ``Up`` or ``Down``, what is better on an axis;
    `inputs` what the images are called, `units` what an interval over the test split is over.
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
class ScoreColumn:
    """A column of the table of scores: the key of a row's summary, and if its spread is shown."""

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


def wording(record: Results) -> Wording:
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


def columns(record: Results) -> list[ScoreColumn]:
    """List the columns of the table of scores, the task's own first, without those no run has."""
    task = record.task_kind
    first, *more = task.scores
    known = [ScoreColumn(key=first.key, head=with_unit(f"test {first.label}", first), score=first)]
    for score in (*more, *page_of(task).test_scores):
        unit = record.own.values.get(score.unit_key) or score.unit
        in_unit = replace(score, unit=str(unit))
        if any(_has(record, score.key)):
            head = with_unit(score.label, in_unit)
            known.append(ScoreColumn(key=score.key, head=head, score=in_unit))
    validation = ScoreColumn(
        key=f"val_{first.key}", head=with_unit("validation", first), score=first, spread=False
    )
    return [*known, validation]


def _has(record: Results, key: str) -> list[bool]:
    found = (row.scores.get(key) for row in record.outcome.last)
    return [summary is not None and summary.mean is not None for summary in found]


def dense_over(record: Results) -> tuple[str, dict[str, str]]:
    """Say over how many steps multiply-adds are counted, for the head of their column.

    "dense, T=4", empty where the model has no spikes; and by label what to say in the cells of
    those with another T, such as the ANN counterpart.
    """
    steps = record.time_steps
    if not record.spikes:
        return "", {}
    most = steps.get(record.baseline) or next(iter(steps.values()), None)
    others = {label: f"T={number}" for label, number in steps.items() if number != most}
    return ("dense, all T" if most is None else f"dense, T={most}"), others
