# SPDX-License-Identifier: Apache-2.0
"""A study of cost as one offline HTML page: from its record, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from keymix.analysis.complexity_record import (
    BASELINE,
    Complexity,
    ComplexityRecord,
    RatioPoint,
    ScalingRow,
)
from keymix.report import charts
from keymix.report.charts import Chart, Line, Look
from keymix.report.page import render_page
from keymix.report.tables import Table
from keymix.studies.complexity.tables import answer, tables


def render(record: ComplexityRecord) -> str:
    """Render the page."""
    looks = charts.looks(
        [entry.label for entry in record.mixers],
        baseline=BASELINE,
        controls=[entry.label for entry in record.mixers if entry.control],
    )
    made = {table.key: table for table in tables(record)}
    counted, ratios = _ratio_charts(record, looks)
    latency, memory = _scaling_charts(record, looks)
    view = {
        "r": record,
        "answer": answer(record),
        "looks": looks,
        "legend": looks,
        "tables": made,
        "lost": _lost(made),
        "charts": [*counted[:1], *(latency or ratios[:1])],
        "ratios": ratios if latency else ratios[1:],
        "memory": memory,
        "spiking": any(entry.domain == "spiking" for entry in record.mixers),
        "without": _without_parameters(record),
        "notes": sorted({row.peak_note for row in record.scaling if row.peak_note}),
    }
    return render_page("own/page.html.j2", view, package=__package__ or "")


def _lost(made: Mapping[str, Table]) -> dict[str, list[str]]:
    """Name where mixers could not be counted or run; the reasons are in the files."""
    found: dict[str, list[str]] = {}
    for label, where, _ in made["missing"].rows if "missing" in made else ():
        found.setdefault(label, []).append(where)
    return found


def _ratio_charts(record: Complexity, looks: Mapping[str, Look]) -> tuple[list[Chart], list[Chart]]:
    """Draw the multiply-adds against tokens; and those per parameter, against tokens and width."""
    setting = record.setting
    lines = _lines(record.by_tokens, looks, "tokens", "macs")
    y_label = "multiply-adds"
    base = next((line for line in lines if line.label == BASELINE), None)
    if base is not None and len(lines) > 1:
        of = dict(zip(base.xs, base.ys, strict=True))
        shares = ([y / of[x] for x, y in zip(n.xs, n.ys, strict=True) if x in of] for n in lines)
        places = ([x for x in line.xs if x in of] for line in lines)
        changed = zip(lines, places, shares, strict=True)
        lines = [replace(line, xs=xs, ys=ys) for line, xs, ys in changed if xs]
        y_label = f"multiply-adds, × {BASELINE}"
    by_tokens, by_dim = f"tokens N, at D = {setting.dim}", f"width D, at N = {setting.at}"
    per = "multiply-adds per parameter"
    counts = _chart("macs", lines, by_tokens, y_label)
    ratios = [
        _chart("by-tokens", _lines(record.by_tokens, looks, "tokens", "ratio"), by_tokens, per),
        _chart("by-dim", _lines(record.by_dim, looks, "dim", "ratio"), by_dim, per),
    ]
    return [*filter(None, [counts])], [*filter(None, ratios)]


def _scaling_charts(
    record: Complexity, looks: Mapping[str, Look]
) -> tuple[list[Chart], list[Chart]]:
    """Draw the latency against tokens; and peak memory of training and inference."""
    rows, batch = record.scaling, record.setting.batch_size
    images = "one image" if batch == 1 else f"a batch of {batch}"
    drawn = [
        _chart(key, _lines(rows, looks, "tokens", key), "tokens N", y_label)
        for key, y_label in (
            ("latency_ms", "latency of one image, ms"),
            ("peak_training_mib", f"peak memory of training {images}, MiB"),
            ("peak_inference_mib", f"peak memory of inference on {images}, MiB"),
        )
    ]
    return [*filter(None, drawn[:1])], [*filter(None, drawn[1:])]


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


def _chart(key: str, lines: Sequence[Line], x_label: str, y_label: str) -> Chart | None:
    """Draw a chart; None if there is nothing to draw."""
    if not lines:
        return None
    name = f"{y_label}{',' if ', ' in y_label else ''} against {x_label}"
    draw = partial(charts.curves, lines=lines, x_label=x_label, y_label=y_label, log=True)
    about = "both axes logarithmic, without controls that are far below"
    return Chart(key, f"{name[0].upper()}{name[1:]}; {about}.", draw)


def _without_parameters(record: Complexity) -> list[str]:
    """List the mixers that have no ratio, since they have no parameters."""
    none = {p.mixer for p in record.by_tokens if p.params == 0}
    return sorted(none)
