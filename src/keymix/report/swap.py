# SPDX-License-Identifier: Apache-2.0
"""A swap as one offline HTML page, and the steps of its search as CSV: from its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from markupsafe import Markup

from keymix.analysis.timing import WORDS, Verdict
from keymix.report.charts import Line, Look, curves
from keymix.report.formats import milliseconds, percent, points
from keymix.report.page import render_page
from keymix.report.tables import Cell, Column, Table, csv_text, text_table
from keymix.swap.record import Search, Step, SwapRecord

_Value = Callable[["StepRow"], Any]


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A step of a search as a row of the CSV file and of the page.

    `layer` is the path of the one that it adds, None of the original model; `share` is of the
    attention's cost in its layers. Loss and top-1 are of the held-out images, `change`
    against the original with its 95 % interval. Times are of one image, None where the machine was
    too busy; their change and quartiles are of the rounds' ratios, less 1. `latency_p` is of the
    test for a difference: None in the first step, and in searches of a version without it.
    """

    step: int
    layer: str | None
    share: float
    loss: float
    top1: float
    change: float
    change_low: float
    change_high: float
    params: int
    macs: int
    latency_ms: float | None
    original_ms: float | None
    latency_change: float | None
    latency_q1: float | None
    latency_q3: float | None
    latency_p: float | None
    latency_verdict: Verdict | None


STEPS = tuple(item.name for item in fields(StepRow))
"""Columns of the steps in the CSV file."""


def steps(search: Search) -> list[StepRow]:
    """Return a search's steps, finished or not, as rows."""
    return [_row(search, number) for number in range(len(search.steps))]


def _row(search: Search, number: int) -> StepRow:
    step = search.steps[number]
    timed = shows_times(step)
    return StepRow(
        step=number,
        layer=search.attention[step.layers[-1]].path if step.layers else None,
        share=step.share,
        loss=step.loss,
        top1=step.top1,
        change=step.top1 - search.steps[0].top1,
        change_low=step.change_low,
        change_high=step.change_high,
        params=step.params,
        macs=step.macs,
        latency_ms=step.latency_ms if timed else None,
        original_ms=step.original_ms if timed else None,
        latency_change=step.latency_ratio - 1 if timed else None,
        latency_q1=step.latency_ratio_q1 - 1 if timed else None,
        latency_q3=step.latency_ratio_q3 - 1 if timed else None,
        latency_p=step.latency_p,
        latency_verdict=step.latency_verdict,
    )


def steps_csv(search: Search) -> str:
    """Write a search's steps as CSV."""
    return csv_text(STEPS, [[getattr(row, name) for name in STEPS] for row in steps(search)])


def tables(record: SwapRecord) -> dict[str, Table]:
    """Make the tables of the page: what became of layers, and of a search its steps and trials."""
    layers = text_table(
        record.layers.heads,
        [["–" if cell == "-" else cell for cell in row] for row in record.layers.rows],
        title="What became of each layer",
        left=len(record.layers.heads),
    )
    unsorted = [replace(column, sort="none") for column in layers.columns]
    made = {"layers": replace(layers, columns=unsorted)}
    if record.search is not None:
        made |= {"steps": _steps_table(record.search), "trials": _trials_table(record.search)}
    return made


def _steps_table(search: Search) -> Table:
    columns = (
        Column("step", "step", "whole"),
        Column("layer added", "layer"),
        Column("share of the cost", "share", "percent", write=_percent_sign),
        Column("loss", "loss", "rate"),
        Column("top-1, %", "top1", "percent"),
        Column("change, points", "change", "percent", write=points),
        Column("95 % interval", "interval", "percent"),
        Column("parameters", "params", "whole"),
        Column("MACs", "macs", "count"),
        Column("latency, ms", "latency_ms", "ms"),
        Column("original, ms", "original_ms", "ms"),
        Column("latency change, %", "latency_change", "percent", write=points),
        Column("quartiles", "quartiles", "percent"),
    )
    rows = []
    for row in steps(search):
        change: Cell | float | None = None if row.layer is None else row.latency_change
        if row.layer is not None and row.latency_verdict != "different":
            change = Cell(row.latency_change, WORDS[row.latency_verdict], "words")
        own = {
            "change": None if row.layer is None else row.change,
            "interval": None if row.layer is None else _range(row.change_low, row.change_high),
            "latency_change": change,
            "quartiles": None if row.layer is None else _range(row.latency_q1, row.latency_q3),
        }
        rows.append([own[c.key] if c.key in own else getattr(row, c.key) for c in columns])
    unsorted = [replace(column, sort="none") for column in columns]
    met = frozenset() if search.met is None else frozenset({search.met})
    return Table("steps", "Every step of the search", unsorted, rows, marked=met)


def _trials_table(search: Search) -> Table:
    columns = [
        Column("layer", "layer"),
        Column("share of the cost", "share", "percent", write=_percent_sign),
        Column("loss", "loss", "rate"),
        Column("rise of the loss", "rise", "rate"),
        Column("top-1", "top1", "percent", write=_percent_sign),
    ]
    if search.cost == "latency":
        columns += [
            Column("attention alone, ms", "latency_ms", "ms"),
            Column("quartiles, ms", "quartiles", "ms", sort="none"),
        ]
    rows: list[list[Any]] = []
    for trial in search.trials:
        attention, rise = search.attention[trial.layer], trial.loss - search.steps[0].loss
        text = f"{rise:+.4f}".replace("-", "−")
        name = Cell(trial.layer, attention.path)
        row = [name, attention.share, trial.loss, Cell(rise, text), trial.top1]
        if search.cost == "latency":
            quartiles = (attention.latency_q1_ms, attention.latency_q3_ms)
            row += [attention.latency_ms, "–".join(map(milliseconds, quartiles))]
        rows.append(row)
    return Table("trials", "Each layer alone", columns, rows)


def _percent_sign(value: float) -> str:
    return f"{percent(value)} %"


def _range(low: float | None, high: float | None) -> str | None:
    return None if low is None else f"{points(low)} to {points(high)}"


def shows_times(step: Step) -> bool:
    """Whether the times of a step and of the original were measured well enough to be shown."""
    return step.latency_verdict != "busy"


def latency_text(step: Step) -> str:
    """Say how much longer or shorter one image takes than in the original, with the quartiles."""
    if step.latency_verdict != "different":
        return WORDS[step.latency_verdict]
    change, low, high = (
        points(ratio - 1)
        for ratio in (step.latency_ratio, step.latency_ratio_q1, step.latency_ratio_q3)
    )
    return f"{change} % (quartiles of the rounds {low} to {high} %)"


def render(record: SwapRecord) -> str:
    """Render a swap's record as an HTML document."""
    search = record.search
    view = {
        "r": record,
        "tables": tables(record),
        "latency": latency_text(record.after),
        "timed": shows_times(record.after),
        "charts": [] if search is None else _charts(search),
    }
    return render_page("swap.html.j2", view)


def _charts(search: Search) -> list[tuple[Markup, str]]:
    rows = steps(search)
    start, met = rows[0].top1, search.met
    drawn = []
    curves_of: tuple[tuple[str, str, bool, _Value, _Value | None], ...] = (
        (
            "top1",
            "top-1 on held-out images, %",
            True,
            lambda row: row.top1,
            lambda row: (start + row.change_low, start + row.change_high),
        ),
        ("loss", "loss on held-out images", False, lambda row: row.loss, None),
        (
            "latency_change",
            "latency change, %",
            True,
            lambda row: row.latency_change,
            lambda row: (row.latency_q1, row.latency_q3),
        ),
    )
    for name, label, fraction, value, ends in curves_of:
        known = [row for row in rows if value(row) is not None]
        if not known:
            continue
        lines = [_line("every step", "c0", known, value)]
        if ends is not None:
            low, high = zip(*map(ends, known), strict=True)
            lines[0] = replace(lines[0], low=low, high=high)
        if met is not None and value(rows[met]) is not None:
            lines.append(_line("the budget", "ink", [rows[met]], value))
        chart = curves(
            lines,
            x_label="share of the attention’s cost that is swapped, %",
            y_label=label,
            name=f"{label} against the share that is swapped",
            percent=fraction,
            markers=True,
            holds=(0.0,) if name == "latency_change" else (),
        )
        reach = [v for line in lines for each in (line.ys, line.low or ()) for v in each]
        note = "The y axis starts above zero." if min(reach) > 0 else ""
        drawn.append((chart, f"{_BANDS.get(name, '')} {note}".strip()))
    return drawn


_BANDS = {
    "top1": "Band: the first step’s accuracy with the 95 % interval of the change.",
    "latency_change": "Band: quartiles of the rounds. Steps that were measured while the machine "
    "was busy are left out.",
}


def _line(label: str, colour: str, rows: Sequence[StepRow], value: _Value) -> Line:
    xs = [100 * row.share for row in rows]
    marker = "circle" if colour == "c0" else "diamond"
    return Line(label, Look(colour, marker, label), xs, [value(row) for row in rows])
