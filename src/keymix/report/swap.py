# SPDX-License-Identifier: Apache-2.0
"""A swap as one offline HTML page, and the steps of its search as CSV: from its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from keymix.analysis.timing import WORDS
from keymix.report.answer import Tile
from keymix.report.charts import Chart, Line, Look, curves, looks
from keymix.report.formats import MISSING, percent, points, three_digits
from keymix.report.page import render_page
from keymix.report.tables import Cell, Column, Table, text_table
from keymix.swap.record import Search, Step, SwapRecord

_Value = Callable[[Step], Any]


def steps_csv(search: Search) -> str:
    """Write a search's steps as CSV, finished or not."""
    return _steps_table(search).csv()


def tables(record: SwapRecord) -> dict[str, Table]:
    """Make the tables of the page: what became of layers, and of a search its steps and trials."""
    layers = text_table(
        record.layers.heads,
        [["–" if cell == "-" else cell for cell in row] for row in record.layers.rows],
        title="What became of each layer",
        left=len(record.layers.heads),
    )
    unsorted = [replace(column, sort="none") for column in layers.columns]
    unsorted[0] = replace(unsorted[0], heading="block")
    numbers = sorted(record.after.layers)
    rows = layers.rows
    if len(numbers) == len(rows):
        rows = [[_block(n, row[0].value), *row[1:]] for n, row in zip(numbers, rows, strict=True)]
    made = {"layers": replace(layers, columns=unsorted, rows=rows)}
    if record.search is not None:
        made |= {"steps": _steps_table(record.search), "trials": _trials_table(record.search)}
    return made


def _block(number: int, path: str) -> Cell:
    """Name a block as people count, from 1, with its path."""
    return Cell(path, f"{number + 1} ({path})")


def _steps_table(search: Search) -> Table:
    """Make the table of steps: `layer` is the one that a step adds, changes are from the original.

    Times are of one image, empty where the machine was too busy; their change and quartiles are of
    the rounds' ratios, less 1.
    """
    columns = (
        Column("step", "step", "whole"),
        Column("block added", "layer"),
        Column("share of the cost", "share", "percent", write=_percent_sign),
        Column("loss", "loss", "rate"),
        Column("top-1, %", "top1", "percent"),
        Column("change, points", "change", "percent", write=points),
        Column("", "change_low", where="csv"),
        Column("", "change_high", where="csv"),
        Column("95 % interval", "interval", "percent", where="people"),
        Column("parameters", "params", "whole"),
        Column("MACs", "macs", "count"),
        Column("latency, ms", "latency_ms", "ms"),
        Column("original, ms", "original_ms", "ms"),
        Column("latency change, %", "latency_change", "percent", write=points),
        Column("", "latency_q1", where="csv"),
        Column("", "latency_q3", where="csv"),
        Column("quartiles", "quartiles", "percent", where="people"),
        Column("", "latency_p", where="csv"),
        Column("", "latency_verdict", where="csv"),
    )
    rows: list[list[Any]] = []
    for number, step in enumerate(search.steps):
        change, slower = step.top1 - search.steps[0].top1, _latency_change(step)
        times = (step.latency_ms, step.original_ms) if shows_times(step) else (None, None)
        quartiles = _quartiles(step) if shows_times(step) else (None, None)
        rows.append(
            [
                number,
                _block(step.layers[-1], search.attention[step.layers[-1]].path)
                if step.layers
                else None,
                *(step.share, step.loss, step.top1),
                change if step.layers else Cell(change, MISSING),
                *(step.change_low, step.change_high),
                _range(step.change_low, step.change_high) if step.layers else None,
                *(step.params, step.macs, *times),
                _slower(step, slower),
                *(*quartiles, _range(*quartiles) if step.layers else None),
                *(step.latency_p, step.latency_verdict),
            ]
        )
    unsorted = [replace(column, sort="none") for column in columns]
    met = frozenset() if search.met is None else frozenset({search.met})
    return Table("steps", "Every step of the search", unsorted, rows, marked=met)


def _slower(step: Step, change: float | None) -> Cell | float | None:
    if not step.layers:
        return Cell(change, MISSING)
    different = step.latency_verdict == "different"
    return change if different else Cell(change, WORDS[step.latency_verdict], "words")


def _latency_change(step: Step) -> float | None:
    return step.latency_change if shows_times(step) else None


def _quartiles(step: Step) -> tuple[float, float]:
    return step.latency_ratio_q1 - 1, step.latency_ratio_q3 - 1


def _trials_table(search: Search) -> Table:
    columns = [
        Column("block", "layer"),
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
        name = Cell(trial.layer, _block(trial.layer, attention.path).text)
        row = [name, attention.share, trial.loss, Cell(rise, text), trial.top1]
        if search.cost == "latency":
            quartiles = (attention.latency_q1_ms, attention.latency_q3_ms)
            row += [attention.latency_ms, "–".join(map(three_digits, quartiles))]
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


LEAD = ("top1", "latency_change", "output", "map")
"""Charts that are shown first: those of a search, or of the blocks of a swap without one."""


def render(record: SwapRecord) -> str:
    """Render a swap's record as an HTML document."""
    search = record.search
    drawn = _of_blocks(record) if search is None else _charts(search)
    view = {
        "r": record,
        "answer": record.sentence.replace(" %", "\u00a0%"),
        "tables": tables(record),
        "latency": latency_text(record.after),
        "timed": shows_times(record.after),
        "tiles": _tiles(record),
        "legend": (),
        "charts": [chart for chart in drawn if chart.key in LEAD],
        "more": [chart for chart in drawn if chart.key not in LEAD],
    }
    return render_page("swap.html.j2", view)


def _tiles(record: SwapRecord) -> list[Tile]:
    """Make the numbers of the first screen; no change is quoted of a single image."""
    before, after, output = record.before, record.after, record.report.output
    scored = f"top-1 on {record.held_out} held-out images ({percent(before.top1)} % before)"
    tiles = [Tile(value=_percent_sign(after.top1), text=scored)]
    if record.held_out > 1:
        span = _range(after.change_low, after.change_high)
        tiles.append(Tile(value=f"{span}", text="points of change, 95\u00a0% interval"))
    if output is not None and output.top1_agreement is not None:
        text = f"of {output.images} calibration images keep their predicted class"
        tiles.append(Tile(value=_percent_sign(output.top1_agreement), text=text))
    tiles += [
        Tile(value=f"{points(new / old - 1)} %", text=what)
        for old, new, what in (
            (before.params, after.params, "parameters"),
            (before.macs, after.macs, "multiply-adds per image"),
        )
        if old
    ]
    return tiles


def _of_blocks(record: SwapRecord) -> list[Chart]:
    """Draw how far each swapped block moved, where that was measured."""
    drawn = []
    for key, label, about in (
        ("output", "change of the output, %", "Root mean square of the change over that before"),
        ("map", "change of the map, %", "Half the sum of absolute changes: 0 alike, 100 disjoint"),
    ):
        at = zip(sorted(record.after.layers), record.report.rows, strict=True)
        found = [
            (number + 1, value)
            for number, row in at
            if (value := getattr(row.drift, key, None)) is not None
        ]
        if not found:
            continue
        xs, ys = zip(*found, strict=True)
        draw = partial(
            curves,
            lines=[Line(record.mixer, looks([record.mixer])[record.mixer], xs, ys)],
            x_label="block",
            y_label=label,
            percent=True,
            holds=(0.0,),
        )
        caption = f"Each swapped block given the original’s tokens, on calibration images. {about}."
        drawn.append(Chart(key, caption, draw))
    return drawn


def _charts(search: Search) -> list[Chart]:
    start, met = search.steps[0].top1, search.met
    drawn = []
    look = looks([search.mixer])[search.mixer]
    curves_of: tuple[tuple[str, str, bool, _Value, _Value | None], ...] = (
        (
            "top1",
            "top-1 on held-out images, %",
            True,
            lambda step: step.top1,
            lambda step: (start + step.change_low, start + step.change_high),
        ),
        ("loss", "loss on held-out images", False, lambda step: step.loss, None),
        ("latency_change", "latency change, %", True, _latency_change, _quartiles),
    )
    for name, label, fraction, value, ends in curves_of:
        known = [step for step in search.steps if value(step) is not None]
        if not known:
            continue
        lines = [_line("every step", look, known, value)]
        if ends is not None:
            low, high = zip(*map(ends, known), strict=True)
            lines[0] = replace(lines[0], low=low, high=high)
        if met is not None and value(search.steps[met]) is not None:
            chosen = Look("ink", "D", "the budget")
            lines.append(_line("the budget", chosen, [search.steps[met]], value))
        draw = partial(
            curves,
            lines=lines,
            x_label="share of the attention’s cost that is swapped, %",
            y_label=label,
            percent=fraction,
            holds=(0.0,) if name == "latency_change" else (),
        )
        caption = f"{label[0].upper()}{label[1:]}, after each step. {_BANDS.get(name, '')}"
        drawn.append(Chart(name, caption.strip(), draw))
    return drawn


_BANDS = {
    "top1": "Diamond: the swap that was written. Band: the first step’s accuracy with the 95 % "
    "interval of the change.",
    "latency_change": "Band: quartiles of the rounds. Steps that were measured while the machine "
    "was busy are left out.",
}


def _line(label: str, look: Look, steps: Sequence[Step], value: _Value) -> Line:
    xs = [100 * step.share for step in steps]
    return Line(label, look, xs, [value(step) for step in steps])
