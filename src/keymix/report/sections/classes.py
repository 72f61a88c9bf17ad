# SPDX-License-Identifier: Apache-2.0
"""Every class of a task with classes: each mixer's score and its difference from the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from keymix.report.by_class import mean
from keymix.report.charts import Dots, Look, dots, shorten
from keymix.report.formats import percent, points
from keymix.report.page import breakable
from keymix.report.part import ClassScores, Section, Shown
from keymix.report.svg import SIZE, svg
from keymix.report.tables import Cell, Column, Table

PLACE = 45
_BASELINE = Cell(0, "baseline", "soft")
FEW = 20
"""Classes that the chart and, until the reader asks for all, the table show."""


@dataclass(frozen=True, kw_only=True)
class ClassesView:
    """The classes, the largest difference first: a column for each mixer; then all their scores.

    `order` are their numbers, `others` the mixers but the baseline and `drawn` those in the chart.
    The `figures`, None where a class has one score, have a row for each class and mixer.
    """

    found: ClassScores
    order: list[int]
    others: list[str]
    drawn: list[str]
    chart: Markup | None
    table: Table
    figures: Table | None
    few: int = FEW


def sections(shown: Shown) -> Iterator[Section]:
    """Show the classes; those of models that learned nothing are not worth a look."""
    found = shown.page.classes(shown.record) if shown.record.learned else None
    if found is not None:
        view = classes_view(found, shown.looks, shown.record.baseline)
        yield Section(name="By class", template="sections/classes.html.j2", view=view)


def classes_view(found: ClassScores, looks: Mapping[str, Look], baseline: str) -> ClassesView:
    """Compare mixers with the baseline class by class.

    Controls are in no chart and decide no order, unless there is nothing else.
    """
    every, names = range(len(found.names)), found.names
    runs = {label: list(of.values()) for label, of in found.scores.items() if of}
    means = {label: [mean(run[c] for run in of) for c in every] for label, of in runs.items()}
    others = [label for label in means if label != baseline]
    differences = {m: [_difference(found, m, baseline, c) for c in every] for m in others}
    drawn = [label for label in others if not looks[label].neutral] or others
    largest = [max((abs(differences[m][c] or 0.0) for m in drawn), default=0.0) for c in every]
    order = sorted(every, key=lambda c: -largest[c])

    counts = [Column(head, head, "whole", style="soft", most_first=True) for head in found.counts]
    listed = [*(label for label in means if label not in others), *others]
    columns = [Column("class", "class"), *counts, *(_column(looks[m], m, baseline) for m in listed)]
    rows: list[list[Any]] = [[names[c], *(n[c] for n in found.counts.values())] for c in order]
    for row, c in zip(rows, order, strict=True):
        for label in listed:
            score = means[label][c]
            row.append(_cell(differences[label][c], score) if label in others else score)
    return ClassesView(
        found=found,
        order=order,
        others=others,
        drawn=drawn,
        chart=_chart(
            [names[c] for c in order[:FEW]],
            {looks[m]: [differences[m][c] for c in order[:FEW]] for m in drawn},
            baseline,
        ),
        table=Table("classes", f"{found.score} by class", columns, rows),
        figures=_figures(found, order, means, differences) if found.further else None,
    )


def _difference(found: ClassScores, mixer: str, baseline: str, c: int) -> float | None:
    """Mixer minus baseline on a class, over the seeds that both finished."""
    base = found.scores[baseline]
    pairs = [(run[c], base[seed][c]) for seed, run in found.scores[mixer].items() if seed in base]
    return mean(None if a is None or b is None else a - b for a, b in pairs)


def _column(look: Look, label: str, baseline: str) -> Column:
    heading = Markup('<bdi title="{}">{}</bdi>').format(label, breakable(look.short))
    return Column(heading, label, "percent", label=look.short, most_first=label != baseline)


def _cell(difference: float | None, score: float | None) -> Cell:
    text = Markup('<span>{} <span class="pm">{}</span></span>')
    return Cell(difference, text.format(points(difference), percent(score)))


def _chart(
    names: Sequence[str], drawn: Mapping[Look, Sequence[float | None]], baseline: str
) -> Markup | None:
    """Draw a row for each of the classes with the largest differences; None without any."""
    series = [
        Dots(look.short, look, [None if value is None else 100 * value for value in values])
        for look, values in drawn.items()
        if any(value is not None for value in values)
    ]
    if not series:
        return None
    x_label = f"difference from {shorten(baseline, 19)}, points"
    return svg(
        partial(dots, names=names, series=series, x_label=x_label),
        name=f"Difference from {baseline} on each of {len(names)} classes",
        size=(SIZE[0], 22.0 * len(names) + 48),
    )


def _figures(
    found: ClassScores,
    order: Sequence[int],
    means: Mapping[str, Any],
    differences: Mapping[str, Any],
) -> Table:
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
            *(values[c], differences[label][c] if label in differences else _BASELINE),
            *(scores[label][c] for scores in found.further.values()),
        ]
        for c in order
        for label, values in means.items()
    ]
    return Table("class-figures", f"{found.score} by class and mixer", columns, rows)
