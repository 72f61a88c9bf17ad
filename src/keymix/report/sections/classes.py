# SPDX-License-Identifier: Apache-2.0
"""Every class of a task with classes: each mixer's score and its difference from the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keymix.report.by_class import ByClass, by_class, compared, mean, mixer_column
from keymix.report.charts import Look
from keymix.report.formats import points
from keymix.report.part import ClassScores, Section, Shown
from keymix.report.tables import Cell, Column, Table

PLACE = 45
_BASELINE = Cell(0, "baseline", "soft")


@dataclass(frozen=True, kw_only=True)
class ClassesView:
    """The classes, the largest difference first: a column for each mixer; then all their scores.

    The `figures`, None where a class has one score, have a row for each class and mixer.
    """

    found: ClassScores
    by: ByClass
    table: Table
    figures: Table | None


def sections(shown: Shown) -> Iterator[Section]:
    """Show the classes; those of models that learned nothing are not worth a look."""
    found = shown.page.classes(shown.record) if shown.record.learned else None
    if found is not None:
        view = classes_view(found, shown.looks, shown.record.baseline)
        yield Section(name="By class", template="sections/classes.html.j2", view=view)


def classes_view(found: ClassScores, looks: Mapping[str, Look], baseline: str) -> ClassesView:
    """Make the tables of classes, and the chart of differences."""
    by = by_class(found.scores, found.names, looks, baseline)
    means = {
        label: [mean(run[c] for run in found.scores[label].values()) for c in range(by.total)]
        for label in by.shown
    }
    base = [baseline] if baseline in means else []
    counts = [
        Column(heading, heading, "whole", style="soft", most_first=True) for heading in found.counts
    ]
    columns = [
        Column("class", "class"),
        *counts,
        *(mixer_column(looks[label], label) for label in base),
        *(mixer_column(looks[label], label, most_first=True) for label in by.others),
    ]
    rows = [
        [
            found.names[c],
            *(count[c] for count in found.counts.values()),
            *(means[label][c] for label in base),
            *(compared(by.differences[label][c], means[label][c]) for label in by.others),
        ]
        for c in by.order
    ]
    title = f"{found.score} by class"
    return ClassesView(
        found=found,
        by=by,
        table=Table("classes", title, columns, rows),
        figures=_figures(found, by, means) if found.further else None,
    )


def _figures(found: ClassScores, by: ByClass, means: Mapping[str, Any]) -> Table:
    """Make the table with a row for each class and mixer."""
    columns = [
        Column("class", "class"),
        Column("mixer", "mixer", "name"),
        *(Column(heading, heading, "whole", style="soft") for heading in found.counts),
        Column(f"{found.score}, %", "score", "percent", most_first=True),
        Column("difference, points", "difference", "percent", write=points, most_first=True),
        *found.further,
    ]
    rows = [
        [
            *(found.names[c], label),
            *(count[c] for count in found.counts.values()),
            *(means[label][c], by.differences[label][c] if label in by.others else _BASELINE),
            *(scores[label][c] for scores in found.further.values()),
        ]
        for c in by.order
        for label in by.shown
    ]
    return Table("class-figures", f"{found.score} by class and mixer", columns, rows)
