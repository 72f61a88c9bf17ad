# SPDX-License-Identifier: Apache-2.0
"""A swap as one offline HTML page, and the steps of its search as CSV: from its plain record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from keymix.analysis.timing import WORDS
from keymix.report import csv_cells
from keymix.report.formats import points
from keymix.report.page import render_page
from keymix.report.plots import Line, Look, curves
from keymix.report.views.payload import as_element_text

Record = Mapping[str, Any]

SCRIPTS = ("core", "tables")
STEPS = (
    "step",
    "layer",
    "share",
    "loss",
    "top1",
    "change",
    "change_low",
    "change_high",
    "params",
    "macs",
    "latency_ms",
    "original_ms",
    "latency_change",
    "latency_q1",
    "latency_q3",
    "latency_p",
    "latency_verdict",
)
"""Columns of the steps in the CSV file. `change` is that of `top1`, a fraction too, with its 95 %
interval; that of the latency and the quartiles next to it are of the ratios, round by round, less
1. `latency_p` and `latency_verdict` are of the test for a difference, empty where there was none:
in the first step, and in searches of a version without it. Where the machine was too busy, in the
first step too, `latency_verdict` is ``busy``, and times and change are empty."""

_TIMES = ("latency_ms", "original_ms", "latency_change", "latency_q1", "latency_q3")


def steps(search: Record) -> list[dict[str, Any]]:
    """Return a search's steps as rows, by the names of `STEPS`.

    Args:
        search: What ``keymix.surgery.search(...).to_dict()`` returns, finished or not.
    """
    rows = []
    for number, step in enumerate(search["steps"]):
        last = step["layers"][-1] if step["layers"] else None
        row: dict[str, Any] = {
            **{name: step[name] for name in STEPS if name in step},
            "step": number,
            "layer": None if last is None else search["attention"][last]["path"],
            "change": step["top1"] - search["steps"][0]["top1"],
            "latency_change": step["latency_ratio"] - 1,
            "latency_q1": step["latency_ratio_q1"] - 1,
            "latency_q3": step["latency_ratio_q3"] - 1,
            "latency_p": step.get("latency_p"),
            "latency_verdict": step.get("latency_verdict"),
        }
        if not shows_times(step):
            row |= dict.fromkeys(_TIMES)
        rows.append(row)
    return rows


def steps_csv(search: Record) -> str:
    """Write a search's steps as CSV."""
    return csv_cells.write(STEPS, [[row[name] for name in STEPS] for row in steps(search)])


def shows_times(step: Record) -> bool:
    """Whether the times of a step and of the original were measured well enough to be shown."""
    return bool(step.get("latency_verdict") != "busy")


def told_latency(step: Record) -> str:
    """Say how much longer or shorter one image takes than in the original, with the quartiles."""
    if (verdict := step.get("latency_verdict")) != "different":
        return WORDS[verdict]
    change, low, high = (
        points(step[name] - 1) for name in ("latency_ratio", "latency_ratio_q1", "latency_ratio_q3")
    )
    return f"{change} % (quartiles of the rounds {low} to {high} %)"


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
        "latency": told_latency(record["after"]),
        "timed": shows_times(record["after"]),
        "words": WORDS,
        "charts": [] if search is None else _charts(search),
        "looks": {},
    }
    return render_page("swap.html.j2", view, payload=as_element_text({}), scripts=SCRIPTS)


def _charts(search: Record) -> list[tuple[Markup, str]]:
    rows, met = steps(search), search["met"]
    drawn = []
    start = rows[0]["top1"]
    for row in rows:
        row |= {"top1_low": start + row["change_low"], "top1_high": start + row["change_high"]}
    for name, label, percent, low, high in (
        ("top1", "top-1 on held-out images, %", True, "top1_low", "top1_high"),
        ("loss", "loss on held-out images", False, "", ""),
        ("latency_change", "latency change, %", True, "latency_q1", "latency_q3"),
    ):
        known = [row for row in rows if row[name] is not None]
        if not known:
            continue
        lines = [_line("every step", "c0", known, name)]
        if low:
            ends = ([row[each] for row in known] for each in (low, high))
            lines[0] = replace(lines[0], low=next(ends), high=next(ends))
        if met is not None and rows[met][name] is not None:
            lines.append(_line("the budget", "ink", [rows[met]], name))
        chart = curves(
            lines,
            x_label="share of the attention’s cost that is swapped, %",
            y_label=label,
            name=f"{label} against the share that is swapped",
            percent=percent,
            markers=True,
            holds=(0.0,) if name == "latency_change" else (),
        )
        reach = [v for line in lines for each in (line.ys, line.low or ()) for v in each]
        told = "The y axis starts above zero." if min(reach) > 0 else ""
        drawn.append((chart, f"{_BANDS.get(name, '')} {told}".strip()))
    return drawn


_BANDS = {
    "top1": "Band: the first step’s accuracy with the 95 % interval of the change.",
    "latency_change": "Band: quartiles of the rounds. Steps that were measured while the machine "
    "was busy are left out.",
}


def _line(label: str, colour: str, rows: Sequence[Record], name: str) -> Line:
    xs = [100 * row["share"] for row in rows]
    marker = "circle" if colour == "c0" else "diamond"
    return Line(label, Look(colour, marker, label), xs, [row[name] for row in rows])
