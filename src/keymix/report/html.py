# SPDX-License-Identifier: Apache-2.0
"""One comparison as one offline HTML page: from the plain record of ``results.json``, no torch.

The page asks nothing of the network and runs no script; it follows light and dark, folds its
tables into cards on a phone, and prints. Every text of the record is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from keymix.errors import UserError
from keymix.report import formats, pictures, plots
from keymix.report.plots import Line, Look, Point, Row

FORMAT = 1
"""Version of the record that this page understands (``record["format"]``)."""

Record = Mapping[str, Any]


def render(record: Record) -> str:
    """Render a comparison's record.

    Args:
        record: The content of ``results.json``, which `keymix.compare.gather` makes.

    Returns:
        The HTML document.

    Raises:
        UserError: If the record has another format version.
    """
    if record.get("format") != FORMAT:
        raise UserError(
            f"record of format {record.get('format')!r} cannot be shown; this keymix reads format "
            f"{FORMAT}. Rebuild it by running the comparison again (finished runs are kept)."
        )
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("keymix.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": formats.percent,
        "points": formats.points,
        "count": formats.count,
        "ms": formats.milliseconds,
        "rate": formats.rate,
        "mib": formats.mib,
        "duration": formats.duration,
        "breakable": _breakable,
        "nice_json": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    }
    env.filters.update(filters)
    env.globals["span"] = formats.span
    return env.get_template("report.html.j2").render(_view(record))


def _breakable(label: str) -> Markup:
    """Let a long label break behind its brackets, commas and slashes."""
    text = escape(label)
    for mark in ("(", ",", "/"):
        text = text.replace(mark, Markup(mark) + Markup("<wbr>"))
    return text


def _view(record: Record) -> dict[str, Any]:
    labels = [m["label"] for m in record["mixers"]]
    controls = [m["label"] for m in record["mixers"] if m["control"]]
    table = plots.looks(labels, baseline=record["baseline"], controls=controls)
    last = {row["mixer"]: row for row in record["outcome"]["last"]}
    best = {row["mixer"]: row for row in record["outcome"]["best"]}
    return {
        "r": record,
        "looks": table,
        "last": last,
        "best": best,
        "others": [row for row in record["outcome"]["last"] if row["mixer"] != record["baseline"]],
        "failed": [run for run in record["runs"] if run["status"] != "done"],
        "top5": any(row["top5"]["mean"] is not None for row in last.values()),
        "forest": _forest(record, table),
        "scatters": _scatters(record, table),
        "curves": _curves(record, table),
        "attention": _attention(record, labels),
        "collapse": _collapse(record, table),
        "seconds": sum(run.get("seconds") or 0 for run in record["runs"]),
    }


def _forest(record: Record, looks: Mapping[str, Look]) -> Markup | None:
    def ends(interval: Mapping[str, Any] | None) -> tuple[float, float] | None:
        if interval is None or interval["low"] is None or interval["high"] is None:
            return None
        return (interval["low"], interval["high"])

    rows = [
        Row(
            label=row["mixer"],
            look=looks[row["mixer"]],
            difference=row["seeds"]["difference"],
            seeds=ends(row["seeds"]),
            images=ends(row["images"]),
        )
        for row in record["outcome"]["last"]
        if row["mixer"] != record["baseline"] and row["seeds"] is not None
    ]
    if not rows:
        return None
    name = "; ".join(f"{r.label} {r.difference * 100:+.1f} points" for r in rows)
    baseline = record["baseline"]
    return plots.forest(rows, baseline=baseline, name=f"Difference from {baseline}: {name}")


COSTS = (
    ("params", "parameters"),
    ("macs", "multiply-adds an image"),
    ("latency_ms", "latency at batch 1, ms"),
    ("peak_mib", "peak memory of a training step, MiB"),
)
UNITS = ((2e9, 1e9, ", G"), (2e6, 1e6, ", M"), (2e4, 1e3, ", k"))


def _scatters(record: Record, looks: Mapping[str, Look]) -> list[Markup]:
    charts = []
    for key, x_label in COSTS:
        costs = record["costs"]
        most = max((c[key] for c in costs.values() if c.get(key) is not None), default=0)
        scale, unit = next(((size, name) for least, size, name in UNITS if most >= least), (1, ""))
        shown = x_label + unit
        points = [
            Point(
                label=row["mixer"],
                look=looks[row["mixer"]],
                x=costs[row["mixer"]][key] / scale,
                y=row["top1"]["mean"],
                spread=row["top1"]["sd"],
            )
            for row in record["outcome"]["last"]
            if row["top1"]["mean"] is not None
            and row["mixer"] in costs
            and costs[row["mixer"]].get(key) is not None
        ]
        if points:
            charts.append(
                plots.scatter(
                    points,
                    x_label=shown,
                    y_label="test accuracy, %",
                    name=f"Test accuracy against {shown}",
                )
            )
    return charts


HISTORY = (
    ("train_loss", "training loss", False),
    ("val_loss", "validation loss", False),
    ("val_top1", "validation accuracy, %", True),
)


def _curves(record: Record, looks: Mapping[str, Look]) -> list[Markup]:
    charts = []
    for key, y_label, is_percent in HISTORY:
        lines = []
        for mixer in looks:
            histories = [
                run["history"]
                for run in record["runs"]
                if run["mixer"] == mixer and run["status"] == "done" and run["history"]
            ]
            line = _line(mixer, looks[mixer], histories, key)
            if line is not None:
                lines.append(line)
        if lines:
            charts.append(
                plots.curves(
                    lines,
                    x_label="epoch",
                    y_label=y_label,
                    percent=is_percent,
                    name=f"{y_label} by epoch",
                )
            )
    return charts


def _line(
    mixer: str, look: Look, histories: Sequence[Sequence[Mapping[str, Any]]], key: str
) -> Line | None:
    if not histories:
        return None
    length = min(len(h) for h in histories)
    rows = [[entry[key] for entry in history[:length]] for history in histories]
    if any(value is None for row in rows for value in row):
        return None
    values = np.array(rows, dtype=np.float64)
    mean = values.mean(axis=0)
    xs = [float(entry["epoch"]) for entry in histories[0][:length]]
    if len(values) < 2:
        return Line(mixer, look, xs, mean.tolist())
    sd = values.std(axis=0, ddof=1)
    return Line(mixer, look, xs, mean.tolist(), (mean - sd).tolist(), (mean + sd).tolist())


def _attention(record: Record, labels: Sequence[str]) -> dict[str, Any] | None:
    """Turn the stored maps into pictures: a block a layer, a row a mixer, a cell an image."""
    stored = record.get("attention")
    if not stored:
        return None
    layers = []
    for position, layer in enumerate(stored["layers"]):
        rows = []
        for label in labels:
            maps = stored["maps"].get(label)
            missing = stored["missing"].get(label)
            if maps is None and missing is None:
                continue
            cells = []
            for image in maps or []:
                values = image[position]
                flat = [v for row in values for v in row]
                cells.append(
                    {
                        "heat": pictures.heat_uri(values),
                        "peak": max(flat),
                        "even": sum(flat) / len(flat),
                    }
                )
            rows.append({"mixer": label, "cells": cells, "missing": missing})
        layers.append({"name": layer, "rows": rows})
    return {"images": stored["images"], "layers": layers, "query": stored["query"]}


def _collapse(record: Record, looks: Mapping[str, Look]) -> Markup | None:
    stored = record.get("collapse")
    if not stored or not stored["similarity"]:
        return None
    pairs = stored["pairs"]
    if len(pairs) < 2:  # two blocks make one number a mixer: the page shows a table
        return None
    lines = [
        Line(label, looks[label], list(range(len(pairs))), values)
        for label, values in stored["similarity"].items()
        if label in looks
    ]
    return plots.curves(
        lines,
        x_label="blocks compared",
        y_label="similarity of their maps",
        name="Similarity of the attention maps of neighbouring blocks",
        x_ticks=list(enumerate(pairs)),
        markers=True,
    )
