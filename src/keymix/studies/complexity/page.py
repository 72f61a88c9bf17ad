# SPDX-License-Identifier: Apache-2.0
"""A study of cost as one offline HTML page: from its record, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from keymix.analysis.complexity_record import (
    BASELINE,
    Complexity,
    ComplexityRecord,
    RatioPoint,
    ScalingRow,
)
from keymix.report import charts
from keymix.report.charts import Line, Look, log_curves, outside
from keymix.report.page import render_page
from keymix.studies.complexity.tables import tables


@dataclass(frozen=True)
class LogChart:
    """A chart with logarithmic axes; label and largest value of each curve that lies below it."""

    svg: Markup
    below: list[tuple[str, float]]


def render(record: ComplexityRecord) -> str:
    """Render the page."""
    looks = charts.looks(
        [entry.label for entry in record.mixers],
        baseline=BASELINE,
        controls=[entry.label for entry in record.mixers if entry.control],
    )
    view = {
        "r": record,
        "looks": looks,
        "tables": {table.key: table for table in tables(record)},
        "ratios": _ratio_charts(record, looks),
        "scaling": _scaling_charts(record, looks),
        "printed": any(point.formula is not None for point in record.by_tokens),
        "spiking": any(entry.domain == "spiking" for entry in record.mixers),
        "without": _without_parameters(record),
        "notes": sorted({row.peak_note for row in record.scaling if row.peak_note}),
    }
    return render_page("own/page.html.j2", view, package=__package__ or "")


def _ratio_charts(record: Complexity, looks: Mapping[str, Look]) -> list[LogChart]:
    setting = record.setting
    drawn = []
    for points, axis, x_label in (
        (record.by_tokens, "tokens", f"tokens N, at D = {setting.dim}"),
        (record.by_dim, "dim", f"width D, at N = {setting.at}"),
    ):
        lines = _lines(points, looks, axis, "ratio")
        printed = {p.mixer for p in points if p.formula is not None}
        drawn.append(
            _chart(lines, x_label, "multiply-adds per parameter", marked=printed.__contains__)
        )
    return [chart for chart in drawn if chart is not None]


def _scaling_charts(record: Complexity, looks: Mapping[str, Look]) -> list[LogChart]:
    rows, batch = record.scaling, record.setting.batch_size
    images = "one image" if batch == 1 else f"a batch of {batch}"
    drawn = []
    for key, y_label in (
        ("latency_ms", "latency of one image, ms"),
        ("peak_training_mib", f"peak memory of training {images}, MiB"),
        ("peak_inference_mib", f"peak memory of inference on {images}, MiB"),
    ):
        drawn.append(_chart(_lines(rows, looks, "tokens", key), "tokens N", y_label))
    return [chart for chart in drawn if chart is not None]


def _lines(
    rows: Sequence[RatioPoint | ScalingRow], looks: Mapping[str, Look], x: str, y: str
) -> list[Line]:
    lines = []
    for label, look in looks.items():
        mine = sorted(
            (getattr(r, x), getattr(r, y)) for r in rows if r.mixer == label and getattr(r, y)
        )
        if mine:
            xs, ys = zip(*mine, strict=True)
            lines.append(Line(label, look, xs, ys))
    return lines


def _chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    marked: Callable[[str], bool] = lambda label: True,
) -> LogChart | None:
    """Draw a chart and say which curves lie below it; None if there is nothing to draw."""
    if not lines:
        return None
    name = f"{y_label} against {x_label}"
    drawn: Markup = log_curves(
        lines,
        x_label=x_label,
        y_label=y_label,
        name=name[0].upper() + name[1:],
        marked=[line.label for line in lines if marked(line.label)],
    )
    return LogChart(drawn, [(line.label, max(line.ys)) for line in outside(lines)])


def _without_parameters(record: Complexity) -> list[str]:
    """List the mixers that have no ratio, since they have no parameters."""
    none = {p.mixer for p in record.by_tokens if p.params == 0}
    return sorted(none)
