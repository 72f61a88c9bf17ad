# SPDX-License-Identifier: Apache-2.0
"""How the mixers learned: curves by epoch, mean over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from keymix.report import charts
from keymix.report.charts import Line, Look
from keymix.report.part import Section, Shown
from keymix.report.record import ComparisonRecord, HistoryLine
from keymix.report.wording import with_unit
from keymix.task import LOSS, Task

PLACE = 40


def sections(shown: Shown) -> Iterator[Section]:
    """Show the curves, where there are any."""
    if drawn := curves(shown.record, shown.looks):
        yield Section(
            heading="How they learned",
            about="Mean over seeds; the band is ± one standard deviation. "
            + shown.record.curves_note,
            legend=list(shown.looks),
            charts=drawn,
            layout="grid3",
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


def curves(record: ComparisonRecord, looks: Mapping[str, Look]) -> list[Markup]:
    """Draw the mean over seeds by epoch with its band, one chart per quantity."""
    drawn = []
    for key, y_label, is_percent in history(record.task_kind):
        lines = []
        for mixer in looks:
            histories = [run.history for run in record.finished(mixer) if run.history]
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
