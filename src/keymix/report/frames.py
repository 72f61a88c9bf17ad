# SPDX-License-Identifier: Apache-2.0
"""The numbers of a comparison as tidy tables, for CSV files and for frames in Python. No torch.

``results.csv`` is `results_table`, ``differences.csv`` is `differences_table`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from keymix.report.record import DoneRun, Results
from keymix.report.tables import Column, Table
from keymix.report.words import finding_text

SCORES = ("mixer", "seed", "epoch", "split", "metric", "value")
MEASURED = ("latency_ms", "images_per_s", "peak_mib")
"""Columns of ``results.csv`` that were measured; all others the same comparison gives again."""
RESULTS = (*SCORES, "params", "macs", *MEASURED)
STEPS = "time_steps"
"""A further column where the model is spiking: T, all of which ``macs`` counts."""
SPIKES = ("firing_rate", "sops", "energy_uj", "energy_low_uj", "energy_high_uj")
"""The columns behind it: of each run's weights of the last epoch."""
DIFFERENCES = (
    *("mixer", "baseline", "epoch", "seeds", "difference", "low", "high", "level"),
    *("p", "p_holm", "degree", "direction"),
)
"""The interval over seeds and test units, and how certain the difference is."""
COSTS = (
    *("params", "macs", "activation_bytes", "latency_ms", "latency_low_ms", "latency_high_ms"),
    *("images_per_s", "step_ms", "peak_mib", STEPS),
)


def tables(record: Results) -> dict[str, Table]:
    """Return every table by name."""
    return {
        "scores": scores_table(record),
        "curves": curves_table(record),
        "differences": differences_table(record),
        "costs": costs_table(record),
        "findings": findings_table(record),
    }


def _table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    return Table(name, name, [Column(key, key) for key in columns], rows)


def scores_table(record: Results) -> Table:
    """Every score of every finished run, of the last epoch and of that best on validation."""
    return _table("scores", SCORES, [scores for _, scores in _scores(record)])


def _scores(record: Results) -> Iterator[tuple[DoneRun, list[Any]]]:
    for run in (run for run in record.runs if isinstance(run, DoneRun)):
        for epoch, mark in (("last", run.last), ("best", run.best)):
            for split, scores in (("val", mark.val), ("test", mark.test)):
                for name, value in scores.items():
                    if value is not None:
                        yield run, [run.mixer, run.seed, epoch, split, name, value]


def results_table(record: Results) -> Table:
    """Every score with the mixer's costs in its row, and of spiking models what spikes cost."""
    spikes = record.spikes
    rows = []
    for run, scores in _scores(record):
        row = [*scores, *_values(record.costs.get(run.mixer), RESULTS[len(SCORES) :])]
        if spikes:
            of_run = run.spikes if scores[2] == "last" else None
            row += [record.time_steps.get(run.mixer), *_values(of_run, SPIKES)]
        rows.append(row)
    return _table("results", (*RESULTS, *((STEPS, *SPIKES) if spikes else ())), rows)


def _values(row: object | None, names: Sequence[str]) -> list[Any]:
    return [None if row is None else getattr(row, name) for name in names]


def curves_table(record: Results) -> Table:
    """The losses and the score on validation of every epoch of every finished run."""
    rows = [
        [run.mixer, run.seed, line.epoch, *key.split("_", 1), value]
        for run in record.runs
        if isinstance(run, DoneRun)
        for line in run.history
        for key, value in line.values.items()
        if value is not None
    ]
    return _table("curves", SCORES, rows)


def differences_table(record: Results) -> Table:
    """Each mixer's difference from the baseline at both epochs, and how certain it is."""
    rows = []
    for epoch, found in (("last", record.outcome.last), ("best", record.outcome.best)):
        for row in found:
            if (i := row.interval) is not None:
                ends = [i.difference, i.low, i.high, i.level, i.p, i.p_holm]
                words = [row.degree, row.direction or ""]
                rows.append([row.mixer, record.baseline, epoch, i.n, *ends, *words])
    return _table("differences", DIFFERENCES, rows)


def costs_table(record: Results) -> Table:
    """What each mixer's model costs."""
    spikes = record.spikes
    rows = []
    for label in record.labels:
        row = [label, *_values(record.costs.get(label), COSTS)]
        if spikes:
            row += [spikes[label][key].mean if label in spikes else None for key in SPIKES]
        rows.append(row)
    return _table("costs", ("mixer", *COSTS, *(SPIKES if spikes else ())), rows)


def findings_table(record: Results) -> Table:
    """What the comparison found out about itself, the most serious first."""
    found = [finding_text(record, each) for each in record.findings]
    rows = [[each.kind, f"{each.heading}. {each.text}", each.remedy] for each in found]
    return _table("findings", ("kind", "text", "remedy"), rows)
