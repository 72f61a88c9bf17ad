# SPDX-License-Identifier: Apache-2.0
"""How a comparison's scores and counts are called on the page and at the terminal.

Its sentences are those of the templates ``*.txt.j2``, which both render by `sentence`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from keymix.analysis.certainty import CLEAR_SEEDS, PROVISIONAL_SEEDS
from keymix.data.kinds import IMAGE
from keymix.data.record import DataRecord
from keymix.report import formats
from keymix.report.page import environment
from keymix.report.part import page_of
from keymix.report.record import ComparisonRecord, Finding
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


def columns(record: ComparisonRecord) -> list[ScoreColumn]:
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


def _has(record: ComparisonRecord, key: str) -> list[bool]:
    found = (row.scores.get(key) for row in record.outcome.last)
    return [summary is not None and summary.mean is not None for summary in found]


def dense_over(record: ComparisonRecord) -> tuple[str, dict[str, str]]:
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


# ---- sentences ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Said:
    """A finding in words, with commands between backticks; `remedy` is what to do about it."""

    kind: str
    heading: str
    text: str
    remedy: str


def said(record: ComparisonRecord, finding: Finding) -> Said:
    """Say a finding."""
    heading, text, remedy = _paragraphs(record, "findings.txt.j2", finding.kind, finding.numbers)
    return Said(kind=finding.kind, heading=heading, text=text, remedy=remedy)


def sentence(record: ComparisonRecord, name: str, *values: object) -> str:
    """Say a sentence of the first screen, by the name of its macro."""
    return " ".join(_paragraphs(record, "answer.txt.j2", name, *values))


def _paragraphs(record: ComparisonRecord, template: str, name: str, *values: object) -> list[str]:
    """Render a macro of a template as plain text, and part it where a line is empty."""
    score, unit, kind = record.task_kind.score, unit_of(record.data), record.data.kind
    limited = record.data.limit is not None
    more = "--limit" if limited else "--data.test_fraction" if record.data.test_fraction else ""

    def ends(found: Any) -> str:
        low, high = (
            (found["low"], found["high"]) if isinstance(found, Mapping) else (found.low, found.high)
        )
        return formats.span(low, high, score) if low is not None else "no interval"

    words = {
        "score": score,
        "baseline": record.baseline,
        "margin": record.margin,
        "found": record.found,
        "blind_baseline": "baseline_at_chance" in record.found,
        "nothing": {"nothing_learned", "one_unit"} & {*record.found},
        "unit": unit,
        "units": f"{unit}s",
        "input": kind.noun,
        "inputs": kind.nouns,
        "more_test": more,
        "clear_seeds": CLEAR_SEEDS,
        "least_seeds": PROVISIONAL_SEEDS,
        "points": lambda difference: score.changed(difference, sign=False),
        "signed": score.changed,
        "ends": ends,
        "seeds": formats.seeds,
        "share": formats.share,
        "listing": formats.listing,
        "control": control_name,
    }
    module = environment().get_template(template).make_module(words)
    text = getattr(module, name)(*values).strip()
    return [re.sub(r"[ \n]+", " ", part).strip() for part in re.split(r"\n\s*\n", text)]
