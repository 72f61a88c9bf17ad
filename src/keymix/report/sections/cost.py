# SPDX-License-Identifier: Apache-2.0
"""What each mixer's model costs, and the score against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from markupsafe import Markup

from keymix.report import charts, formats
from keymix.report.charts import Chart, Look, Point
from keymix.report.part import Section, Shown
from keymix.report.record import CostRow, Results
from keymix.report.sections.mixers import dense_over
from keymix.report.tables import Cell, Column, Table
from keymix.report.words import said

PLACE = 20

COSTS = (
    ("macs", "multiply-adds {input}"),
    ("latency_ms", "latency at batch 1, ms"),
    ("step_ms", "training step, ms"),
    ("params", "parameters"),
    ("peak_mib", "peak memory of a training step, MiB"),
    ("energy_uj", "energy {input}, µJ"),
)
UNITS = ((2e9, 1e9, ", G"), (2e6, 1e6, ", M"), (2e4, 1e3, ", k"))


def sections(shown: Shown) -> Iterator[Section]:
    """Show the costs, and the score against those that were measured."""
    record = shown.record
    notes = [((mixer.label,), mixer.note) for mixer in record.mixers if mixer.note]
    notes += [((m,), note) for m, cost in record.costs.items() for note in said("cost_notes", cost)]
    view = {"charts": scatters(record, shown.looks), "table": table(record), "notes": notes}
    yield Section(name="Cost", template="sections/cost.html.j2", view=view)


def table(record: Results) -> Table:
    """Make the table of costs, one row per mixer."""
    dense, at = dense_over(record)
    steps = f", {dense}" if dense else ""
    kept, batch = "activations kept to train, MiB per image", record.measured.batch_size
    columns = (
        Column("mixer", "mixer", "name"),
        Column("parameters", "params", "count"),
        Column(f"multiply-adds per image{steps}", "macs", "count"),
        Column(kept, "activation_mib", "mib", label="activations, MiB per image"),
        Column("latency, ms batch\u00a01", "latency_ms", "ms", label="latency, ms"),
        Column("middle half of timings", "quartiles", "ms", sort="none", style="soft"),
        Column(
            f"images per second batch\u00a0{batch}",
            "images_per_s",
            "per_s",
            label="images per second",
            most_first=True,
        ),
        Column("training step, ms", "step_ms", "ms"),
        Column("peak memory, MiB", "peak_mib", "mib"),
    )
    rows = [[label, *_cells(cost, at.get(label))] for label, cost in record.costs.items()]
    return Table("costs", "Cost of each mixer", columns, rows)


def _cells(cost: CostRow, steps: str | None) -> list[Any]:
    """Make the cells of a mixer, with its time steps where they are not those of the heading."""
    low, high = cost.latency_low_ms, cost.latency_high_ms
    macs = Markup('{} <span class="soft">{}</span>').format(formats.count(cost.macs), steps)
    return [
        cost.params,
        cost.macs if steps is None else Cell(cost.macs, macs),
        None if cost.activation_bytes is None else cost.activation_bytes / 2**20,
        cost.latency_ms,
        None if low is None else "–".join(map(formats.three_digits, (low, high))),
        cost.images_per_s,
        cost.step_ms,
        cost.peak_mib,
    ]


def scatters(record: Results, looks: Mapping[str, Look]) -> dict[str, Chart]:
    """Make the charts of the score against each cost that is known, by what the cost is called."""
    drawn: dict[str, Chart] = {}
    score, kind = record.task_kind.score, record.data.kind
    known = {row.name: row.scores.get(score.key) for row in record.references}
    levels = {name: value for name, value in known.items() if value is not None}
    for key, label in COSTS:
        x_label = label.format(input=f"per {kind.noun}")
        known_costs = ((each, record.cost(each, key)) for each in record.labels)
        costs = {each: value for each, value in known_costs if value is not None}
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
            draw = partial(
                charts.pareto,
                points=points,
                x_label=shown,
                y_label=formats.with_unit(f"test {score.label}", score),
                score=score,
                levels=levels,
                baseline=record.baseline,
            )
            drawn[x_label] = Chart(key, f"Test {score.label} against {shown}", draw)
    return drawn
