# SPDX-License-Identifier: Apache-2.0
"""Whether deep layers repeat themselves: how alike the maps of neighbouring blocks are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from markupsafe import Markup

from keymix.report import charts
from keymix.report.charts import Chart, Line, Look
from keymix.report.page import by_reason
from keymix.report.part import Section, Shown
from keymix.report.record import Collapse
from keymix.report.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLACE = 70


def sections(shown: Shown) -> Iterator[Section]:
    """Show the similarity of neighbours, where there are more than two."""
    found = shown.pictures.collapse
    if found and found.similarity and len(found.pairs) > 1 and shown.record.learned:
        yield Section(
            name="Collapse",
            heading="Do deep layers repeat themselves?",
            about=say("collapse", found),
            legend=list(found.similarity),
            charts=(chart(found, shown.looks),),
            notes=[(labels, reason) for reason, labels in by_reason(found.missing)],
            layout="narrow",
        )


def chart(found: Collapse, looks: Mapping[str, Look]) -> Markup:
    """Draw the similarities along the blocks."""
    pairs = found.pairs
    lines = [
        Line(label, looks[label], list(range(len(values))), values)
        for label, values in found.similarity.items()
        if label in looks
    ]
    every = range(0, len(pairs), -(-len(pairs) // 8))  # at most eight names on the axis

    def draw(ax: Axes) -> None:
        charts.curves(ax, lines, x_label="blocks compared", y_label="similarity of their maps")
        ax.set_xticks(every, [pairs[i] for i in every])

    return Chart("collapse", "Similarity of the attention maps of neighbouring blocks", draw).svg
