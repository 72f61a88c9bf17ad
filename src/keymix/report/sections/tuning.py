# SPDX-License-Identifier: Apache-2.0
"""How the learning rate was chosen, where it was."""

from __future__ import annotations

from collections.abc import Iterator

from keymix.report.formats import scored, with_unit
from keymix.report.part import Section, Shown
from keymix.report.record import Tuning
from keymix.report.tables import Cell, Column, Table
from keymix.report.words import say
from keymix.task import Score

PLACE = 45


def sections(shown: Shown) -> Iterator[Section]:
    """Show the validation scores at each rate, where the rate was tuned."""
    record = shown.record
    if record.tuning is not None:
        yield Section(
            heading="Learning rate",
            about=f"{say('tuning', record.tuning, record.task_kind.score)} {say('tuned')}",
            tables=[table(record.tuning, record.task_kind.score)],
        )


def table(found: Tuning, score: Score) -> Table:
    """Make the table of validation scores, one row per mixer and one column per rate."""
    columns = [
        Column("mixer", "mixer", "name"),
        *(
            Column(f"{with_unit('validation', score)} at {row.rate:g}", f"{row.rate:g}", "ratio")
            for row in found.rows
        ),
    ]
    labels = dict.fromkeys(label for row in found.rows for label in row.scores)
    rows = [
        [label, *(_cell(row.scores.get(label), score) for row in found.rows)] for label in labels
    ]
    rows.append(["mean", *(_cell(row.mean, score) for row in found.rows)])
    return Table("tuning", "Validation scores by learning rate", columns, rows)


def _cell(value: float | None, score: Score) -> Cell:
    return Cell(value, scored(value, score))
