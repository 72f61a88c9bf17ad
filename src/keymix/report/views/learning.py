# SPDX-License-Identifier: Apache-2.0
"""Curves on the page: how the mixers learned, and how alike the maps of their blocks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from keymix.report import charts
from keymix.report.charts import Line, Look
from keymix.report.record import ComparisonRecord, HistoryLine
from keymix.report.views.runs import finished
from keymix.report.views.wording import with_unit
from keymix.task import LOSS, Task


def history(task: Task) -> tuple[tuple[str, str, bool], ...]:
    """Tell what is drawn by epoch: its key, the title of its axis, whether it is a fraction."""
    score = task.score
    axis = with_unit(f"validation {score.label}", score)
    validation = ((f"val_{LOSS}", "validation loss", False),) if task.validation_loss else ()
    return (
        (f"train_{LOSS}", "training loss", False),
        *validation,
        (f"val_{score.key}", axis, score.unit == "%"),
    )


def curves(record: ComparisonRecord, looks: Mapping[str, Look]) -> list[Markup]:
    """Draw the mean over seeds by epoch with its band, one chart a quantity."""
    drawn = []
    for key, y_label, is_percent in history(record.task_kind):
        lines = []
        for mixer in looks:
            histories = [run.history for run in finished(record, mixer) if run.history]
            line = _line(mixer, looks[mixer], histories, key)
            if line is not None:
                lines.append(line)
        if lines:
            drawn.append(
                charts.curves(
                    lines,
                    x_label="epoch",
                    y_label=y_label,
                    percent=is_percent,
                    name=f"{y_label} by epoch",
                )
            )
    return drawn


def _line(
    mixer: str, look: Look, histories: Sequence[Sequence[HistoryLine]], key: str
) -> Line | None:
    if not histories:
        return None
    by_epoch = [{line.epoch: line.values.get(key) for line in history} for history in histories]
    shared = [epoch for epoch in by_epoch[0] if all(epoch in run for run in by_epoch)]
    rows = [[run[epoch] for epoch in shared] for run in by_epoch]
    if not shared:
        return None
    if any(value is None for row in rows for value in row):
        return None
    values = np.array(rows, dtype=np.float64)
    mean = values.mean(axis=0)
    xs = [float(epoch) for epoch in shared]
    if len(values) < 2:
        return Line(mixer, look, xs, mean.tolist())
    sd = values.std(axis=0, ddof=1)
    return Line(mixer, look, xs, mean.tolist(), (mean - sd).tolist(), (mean + sd).tolist())


def collapse(record: ComparisonRecord, looks: Mapping[str, Look]) -> Markup | None:
    """Draw how alike the maps of neighbouring blocks are; two blocks make no chart."""
    stored = record.collapse
    if not stored or not stored.similarity:
        return None
    pairs = stored.pairs
    if len(pairs) < 2:  # two blocks make one number a mixer: the page shows a table
        return None
    lines = [
        Line(label, looks[label], list(range(len(values))), values)
        for label, values in stored.similarity.items()
        if label in looks
    ]
    every = -(-len(pairs) // 8)  # at most eight names on the axis
    return charts.curves(
        lines,
        x_label="blocks compared",
        y_label="similarity of their maps",
        name="Similarity of the attention maps of neighbouring blocks",
        x_ticks=[(i, pair) for i, pair in enumerate(pairs) if i % every == 0],
        markers=True,
    )
