# SPDX-License-Identifier: Apache-2.0
"""Accuracy on the page: the differences with their intervals, and accuracy against cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from keymix.data.tasks import task_of
from keymix.report import plots
from keymix.report.formats import points
from keymix.report.plots import Look, Point, Row
from keymix.report.views.wording import wording

Record = Mapping[str, Any]

COSTS = (
    ("params", "parameters"),
    ("macs", "multiply-adds an image"),
    ("latency_ms", "latency at batch 1, ms"),
    ("peak_mib", "peak memory of a training step, MiB"),
    ("energy_uj", "energy an image, µJ"),
)
UNITS = ((2e9, 1e9, ", G"), (2e6, 1e6, ", M"), (2e4, 1e3, ", k"))


def forest(record: Record, looks: Mapping[str, Look]) -> Markup | None:
    """Draw every mixer's difference from the baseline with both intervals."""
    rows = [
        Row(
            label=row["mixer"],
            look=looks[row["mixer"]],
            difference=row["seeds"]["difference"],
            seeds=_ends(row["seeds"]),
            images=_ends(row["images"]),
        )
        for row in record["outcome"]["last"]
        if row["mixer"] != record["baseline"] and row["seeds"] is not None
    ]
    if not rows:
        return None
    name = "; ".join(f"{r.label} {points(r.difference)} points" for r in rows)
    baseline = record["baseline"]
    return plots.forest(rows, baseline=baseline, name=f"Difference from {baseline}: {name}")


def _ends(interval: Mapping[str, Any] | None) -> tuple[float, float] | None:
    if interval is None or interval["low"] is None or interval["high"] is None:
        return None
    return (interval["low"], interval["high"])


def _costs(record: Record) -> dict[str, dict[str, Any]]:
    """Return every mixer's costs, with the energy of those whose spikes were read."""
    spikes = (record.get("spikes") or {"mixers": {}})["mixers"]
    return {
        label: {
            **cost,
            "energy_uj": spikes[label]["energy_uj"]["mean"] if label in spikes else None,
        }
        for label, cost in record["costs"].items()
    }


def scatters(record: Record, looks: Mapping[str, Look]) -> list[Markup]:
    """Draw accuracy, or overlap, against each cost that was measured."""
    charts = []
    task = task_of(record)
    score, short = task.score, wording(task).short
    costs = _costs(record)
    for key, x_label in COSTS:
        most = max((c[key] for c in costs.values() if c.get(key) is not None), default=0)
        scale, unit = next(((size, name) for least, size, name in UNITS if most >= least), (1, ""))
        dense = key == "macs" and record.get("spikes")
        shown = f"{x_label}, dense, all T{unit}" if dense else x_label + unit
        points = [
            Point(
                label=row["mixer"],
                look=looks[row["mixer"]],
                x=costs[row["mixer"]][key] / scale,
                y=row[score]["mean"],
                spread=row[score]["sd"],
            )
            for row in record["outcome"]["last"]
            if row[score]["mean"] is not None
            and row["mixer"] in costs
            and costs[row["mixer"]].get(key) is not None
        ]
        if points:
            charts.append(
                plots.scatter(
                    points,
                    x_label=shown,
                    y_label=f"test {short}, %",
                    name=f"Test {short} against {shown}",
                )
            )
    return charts
