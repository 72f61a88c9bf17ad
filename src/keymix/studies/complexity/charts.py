# SPDX-License-Identifier: Apache-2.0
"""The charts of a study of cost. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from keymix.analysis.complexity_record import (
    BASELINE,
    MixerCosts,
    RatioPoint,
    ScalingRow,
)
from keymix.report import charts
from keymix.report.charts import Chart, Line, Look
from keymix.report.tables import Table


def lost(made: Mapping[str, Table]) -> dict[str, list[str]]:
    """Name where mixers could not be counted or run; the reasons are in the files."""
    found: dict[str, list[str]] = {}
    for label, where, _ in made["missing"].rows if "missing" in made else ():
        found.setdefault(label, []).append(where)
    return found


def ratio_charts(record: MixerCosts, looks: Mapping[str, Look]) -> tuple[list[Chart], list[Chart]]:
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


def scaling_charts(
    record: MixerCosts, looks: Mapping[str, Look]
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


def without_parameters(record: MixerCosts) -> list[str]:
    """List the mixers that have no ratio, since they have no parameters."""
    none = {p.mixer for p in record.by_tokens if p.params == 0}
    return sorted(none)
