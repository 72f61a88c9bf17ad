# SPDX-License-Identifier: Apache-2.0
"""A swap as one offline HTML page, and the steps of its search as CSV: from its plain record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from keymix.report import csv_cells
from keymix.report.page import render_page
from keymix.report.plots import Line, Look, curves
from keymix.report.views.payload import as_element_text

Record = Mapping[str, Any]

SCRIPTS = ("core", "tables")
STEPS = (
    ("step", "step"),
    ("layer", "layer added"),
    ("share", "share of the cost"),
    ("loss", "loss"),
    ("top1", "top-1"),
    ("points", "top-1 change"),
    ("params", "parameters"),
    ("macs", "MACs"),
    ("latency_ms", "latency, ms"),
    ("original_ms", "original, ms"),
    ("latency_change", "latency change"),
)
"""Columns of the steps: names in the CSV file, and headings."""


def steps(search: Record) -> list[dict[str, Any]]:
    """Return a search's steps as rows, by the names of `STEPS`.

    Args:
        search: What ``keymix.surgery.search(...).to_dict()`` returns, finished or not.
    """
    rows = []
    for number, step in enumerate(search["steps"]):
        last = step["layers"][-1] if step["layers"] else None
        rows.append(
            {
                **{name: step[name] for name, _ in STEPS if name in step},
                "step": number,
                "layer": None if last is None else search["attention"][last]["path"],
                "points": step["top1"] - search["steps"][0]["top1"],
                "latency_change": step["latency_ms"] / step["original_ms"] - 1,
            }
        )
    return rows


def steps_csv(search: Record) -> str:
    """Write a search's steps as CSV."""
    names = [name for name, _ in STEPS]
    return csv_cells.write(names, [[row[name] for name in names] for row in steps(search)])


def render(record: Record) -> str:
    """Render a swap's record.

    Args:
        record: What ``keymix swap`` writes to ``swap.json``, with ``search``, ``environment``
            (lines by name), ``command`` and ``created`` in it, and the heads and rows of the
            layers' table in ``layers``.

    Returns:
        The HTML document.
    """
    search = record["search"]
    view = {
        "r": record,
        "steps": [] if search is None else steps(search),
        "headings": [heading for _, heading in STEPS],
        "charts": [] if search is None else _charts(search),
        "looks": {},
    }
    return render_page("swap.html.j2", view, payload=as_element_text({}), scripts=SCRIPTS)


def _charts(search: Record) -> list[Markup]:
    rows, met = steps(search), search["met"]
    drawn = []
    for name, label, percent in (
        ("top1", "top-1 on held-out images, %", True),
        ("loss", "loss on held-out images", False),
        ("latency_change", "change of the latency of one image, %", True),
    ):
        lines = [_line("every step", "c0", rows, name)]
        if met is not None:
            lines.append(_line("the budget", "ink", [rows[met]], name))
        drawn.append(
            curves(
                lines,
                x_label="share of the attention’s cost that is swapped, %",
                y_label=label,
                name=f"{label} against the share that is swapped",
                percent=percent,
                markers=True,
            )
        )
    return drawn


def _line(label: str, colour: str, rows: Sequence[Record], name: str) -> Line:
    xs = [100 * row["share"] for row in rows]
    marker = "circle" if colour == "c0" else "diamond"
    return Line(label, Look(colour, marker, label), xs, [row[name] for row in rows])
