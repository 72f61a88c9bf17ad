# SPDX-License-Identifier: Apache-2.0
"""How the mixers learned: curves by epoch, mean over seeds, and who led when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from keymix.analysis.statistics import FloatArray
from keymix.report import charts
from keymix.report.charts import Chart, Line, Look
from keymix.report.formats import listing, scored, with_unit
from keymix.report.part import Section, Shown
from keymix.report.record import HistoryLine, Results
from keymix.report.tables import Cell, Column, Table
from keymix.report.words import say
from keymix.task import LOSS, Task

PLACE = 40
PARTS = (10, 30, 100)
"""Percent of the training after which mixers are ranked."""
LEAST_EPOCHS = 10
"""Epochs below which a tenth of the training is none."""


def sections(shown: Shown) -> Iterator[Section]:
    """Show the curves, where there are any."""
    record = shown.record
    if drawn := curves(record, shown.looks):
        early, late, table = leads(record)
        yield Section(
            name="Learning",
            heading="How they learned",
            about=say("learning", record, early, late, PARTS[0]),
            legend=list(shown.looks),
            charts=[chart.svg for chart in drawn],
            layout="grid3",
            tables=[] if table is None else [table],
        )


def history(task: Task) -> tuple[tuple[str, str, bool], ...]:
    """Say what is drawn by epoch: its key, the title of its axis, whether it is a fraction."""
    score = task.score
    axis = with_unit(f"validation {score.label}", score)
    validation = ((f"val_{LOSS}", "validation loss", False),) if task.validation_loss else ()
    return (
        (f"train_{LOSS}", "training loss", False),
        *validation,
        (f"val_{score.key}", axis, score.unit == "%"),
    )


def curves(record: Results, looks: Mapping[str, Look]) -> list[Chart]:
    """Make the charts of the mean over seeds by epoch with its band, one per quantity."""
    drawn, score = [], record.task_kind.score
    for key, y_label, is_percent in history(record.task_kind):
        lines = []
        for mixer in looks:
            histories = [run.history for run in record.finished(mixer) if run.history]
            line = _line(mixer, looks[mixer], histories, key)
            if line is not None:
                lines.append(line)
        decides = key == f"val_{score.key}"
        known = {row.name: row.validation for row in record.references if decides}
        if lines:
            draw = partial(
                charts.curves,
                lines=lines,
                levels={name: value for name, value in known.items() if value is not None},
                x_label="epoch",
                y_label=y_label,
                percent=is_percent,
                within=(score.low, score.high) if decides else (None, None),
            )
            drawn.append(Chart(key, f"{y_label} by epoch", draw))
    return drawn


def _line(
    mixer: str, look: Look, histories: Sequence[Sequence[HistoryLine]], key: str
) -> Line | None:
    found = _by_epoch(histories, key)
    if found is None:
        return None
    epochs, values = found
    mean = values.mean(axis=0)
    xs = [float(epoch) for epoch in epochs]
    if len(values) < 2:
        return Line(mixer, look, xs, mean.tolist())
    sd = values.std(axis=0, ddof=1)
    return Line(mixer, look, xs, mean.tolist(), (mean - sd).tolist(), (mean + sd).tolist())


def _by_epoch(
    histories: Sequence[Sequence[HistoryLine]], key: str
) -> tuple[list[int], FloatArray] | None:
    """Return the epochs that all runs have, and their values; None if one is missing."""
    if not histories:
        return None
    by_epoch = [{line.epoch: line.values.get(key) for line in history} for history in histories]
    shared = [epoch for epoch in by_epoch[0] if all(epoch in run for run in by_epoch)]
    rows = [[run[epoch] for epoch in shared] for run in by_epoch]
    if not shared or any(value is None for row in rows for value in row):
        return None
    return shared, np.array(rows, dtype=np.float64)


def leads(record: Results) -> tuple[str, str, Table | None]:
    """Say who is best on validation after the first part of the training, and who at its end.

    With the table of all parts; nothing for fewer than ten epochs.
    """
    score, total = record.task_kind.score, record.recipe.schedule.epochs
    wanted = [round(total * part / 100) for part in PARTS]
    means: dict[str, list[float]] = {}
    for mixer in record.labels if total >= LEAST_EPOCHS else ():
        histories = [run.history for run in record.finished(mixer) if run.history]
        found = _by_epoch(histories, f"val_{score.key}")
        if found is not None and {*wanted} <= {*found[0]}:
            mean = found[1].mean(axis=0)
            means[mixer] = [float(mean[found[0].index(epoch)]) for epoch in wanted]
    if len(means) < 2:
        return "", "", None
    firsts = []
    for values in zip(*means.values(), strict=True):
        best = scored(max(values, key=score.rank), score)
        mixers = [m for m, value in zip(means, values, strict=True) if scored(value, score) == best]
        firsts.append("all equal" if len(mixers) == len(means) else listing(mixers))
    heads = [
        Column(f"after {part}\u00a0%", f"after_{part}", "ratio", most_first=score.better == "more")
        for part in PARTS
    ]
    rows = [[m, *(Cell(value, scored(value, score)) for value in of)] for m, of in means.items()]
    title = f"Validation {score.name} after parts of the training"
    table = Table("parts", title, (Column("mixer", "mixer", "name"), *heads), rows)
    return firsts[0], firsts[-1], table
