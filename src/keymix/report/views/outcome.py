# SPDX-License-Identifier: Apache-2.0
"""Scores on the page: the differences with their intervals, and the score against cost."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from keymix.analysis.statistics import Interval
from keymix.report import charts
from keymix.report.charts import Look, Point, Row
from keymix.report.record import ComparisonRecord, Number
from keymix.report.views.wording import with_unit, wording

COSTS = (
    ("params", "parameters"),
    ("macs", "multiply-adds {input}"),
    ("latency_ms", "latency at batch 1, ms"),
    ("peak_mib", "peak memory of a training step, MiB"),
    ("energy_uj", "energy {input}, µJ"),
)
UNITS = ((2e9, 1e9, ", G"), (2e6, 1e6, ", M"), (2e4, 1e3, ", k"))


def forest(record: ComparisonRecord, looks: Mapping[str, Look]) -> Markup | None:
    """Draw every mixer's difference from the baseline with both intervals."""
    rows = [
        Row(
            label=row.mixer,
            look=looks[row.mixer],
            difference=row.seeds.difference,
            seeds=_ends(row.seeds),
            images=_ends(row.images),
        )
        for row in record.outcome.last
        if row.mixer != record.baseline and row.seeds is not None
    ]
    if not rows:
        return None
    score, baseline = record.task_kind.score, record.baseline
    name = "; ".join(f"{r.label} {score.changed(r.difference)}" for r in rows)
    return charts.forest(
        rows,
        baseline=baseline,
        name=f"Difference from {baseline}: {name}",
        score=score,
        units=wording(record).units,
    )


def _ends(interval: Interval | None) -> tuple[float, float] | None:
    if interval is None or interval.low is None or interval.high is None:
        return None
    return (interval.low, interval.high)


def _cost(record: ComparisonRecord, key: str) -> dict[str, Number]:
    """Return a cost by mixer's label, as far as it is known."""
    if key == "energy_uj":
        spikes = record.spikes.mixers if record.spikes else {}
        energies = {
            label: spikes[label].energy_uj.mean for label in record.costs if label in spikes
        }
        return {label: value for label, value in energies.items() if value is not None}
    costs = {label: getattr(cost, key) for label, cost in record.costs.items()}
    return {label: value for label, value in costs.items() if value is not None}


def scatters(record: ComparisonRecord, looks: Mapping[str, Look]) -> list[Markup]:
    """Draw the score against each cost that was measured."""
    drawn = []
    score, kind = record.task_kind.score, record.data.kind
    for key, told in COSTS:
        x_label = told.format(input=kind.one)
        costs = _cost(record, key)
        most = max(costs.values(), default=0)
        scale, unit = next(((size, name) for least, size, name in UNITS if most >= least), (1, ""))
        dense = key == "macs" and record.spikes
        shown = f"{x_label}, dense, all T{unit}" if dense else x_label + unit
        points = [
            Point(
                label=row.mixer,
                look=looks[row.mixer],
                x=costs[row.mixer] / scale,
                y=mean,
                spread=row.scores[score.key].sd,
            )
            for row in record.outcome.last
            if (mean := row.scores[score.key].mean) is not None and row.mixer in costs
        ]
        if points:
            drawn.append(
                charts.scatter(
                    points,
                    x_label=shown,
                    y_label=with_unit(f"test {score.label}", score),
                    name=f"Test {score.label} against {shown}",
                    score=score,
                )
            )
    return drawn
