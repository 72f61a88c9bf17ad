# SPDX-License-Identifier: Apache-2.0
"""What the runs start from, where that is a trained model, and what it scored with each mixer."""

from __future__ import annotations

from collections.abc import Iterator

from keymix.report.formats import scored, with_unit
from keymix.report.part import Section, Shown
from keymix.report.tables import Cell, Column, Table
from keymix.report.words import say

PLACE = 44


def sections(shown: Shown) -> Iterator[Section]:
    """Show validation scores before any training and after it."""
    record, start = shown.record, shown.record.start
    if start is None:
        return
    score = record.task_kind.score
    trained = {row.mixer: row.scores[f"val_{score.key}"].mean for row in record.outcome.last}
    rows = [
        [label, *(Cell(each, scored(each, score)) for each in (before.get(score.key), after))]
        for label, after in trained.items()
        if (before := start.scores.get(label)) is not None
    ]
    columns = [
        Column("mixer", "mixer", "name"),
        Column(f"{with_unit('validation', score)} before training", "before", "ratio"),
        Column("after, mean over seeds", "after", "ratio"),
    ]
    table = Table("start", "Validation scores before and after training", columns, rows)
    yield Section(heading="Start", about=say("start", start), tables=[table] if rows else [])
