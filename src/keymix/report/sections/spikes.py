# SPDX-License-Identifier: Apache-2.0
"""What spikes cost: one row per mixer of a spiking model, on the page and at the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keymix.analysis.energy import ENERGIES
from keymix.analysis.spikes_record import DEAD
from keymix.analysis.statistics import Summary
from keymix.report import formats
from keymix.report.part import Section, Shown, page_of
from keymix.report.record import Results
from keymix.report.tables import Cell, Column, Table
from keymix.report.words import say

PLACE = 30

FAILING = "these rates and energies say nothing of models that work."
"""What is said of a mixer whose models do not work, behind the reason."""

COLUMNS = (
    Column("mixer", "mixer", "name"),
    Column("spikes per neuron and step", "rate", "rate"),
    Column(
        "neurons that never fired, %", "silent", "percent", label="never fired, %", style="soft"
    ),
    Column("synaptic operations per image", "sops", "count", label="synaptic operations"),
    Column("multiply-adds, real inputs", "macs", "count", label="multiply-adds"),
    Column("energy per image, µJ", "energy", "energy", label="energy, µJ"),
    Column("bounds, µJ", "bounds", "energy", sort="none", style="soft"),
    Column("without spikes, µJ", "dense", "energy"),
    Column("times as much", "times", "ratio"),
)


def sections(shown: Shown) -> Iterator[Section]:
    """Show rates, operations and energies, where the model is spiking."""
    record = shown.record
    if record.spikes:
        yield Section(
            heading="What spikes cost",
            about=say("spikes", record, ENERGIES["fp32"]),
            tables=[table(record)],
            notes=[(labels, note) for note, labels in notes(record).items()],
        )


def table(record: Results) -> Table:
    """Make the table of spikes: quantities with their spread over seeds; energies in µJ."""
    title = "Firing rates, operations and energy of each mixer’s trained models"
    rows = [
        [label, *_cells(found, works=not _failing(record, label))]
        for label, found in record.spikes.items()
    ]
    return Table("spikes", title, COLUMNS, rows)


def notes(record: Results) -> dict[str, list[str]]:
    """Return what is out of the ordinary, with the mixers that it is said of."""
    found: dict[str, list[str]] = {}
    for label, means in record.spikes.items():
        of_runs = (run.spikes.notes for run in record.finished(label) if run.spikes)
        said = dict.fromkeys(note for each in of_runs for note in each)
        silent = (means["silent"].mean or 0.0) > DEAD
        why = "hardly a neuron fires" if silent else _failing(record, label)
        for note in (*said, *([f"{why[0].upper()}{why[1:]}: {FAILING}"] if why else [])):
            found.setdefault(note, []).append(label)
    return found


def _failing(record: Results, mixer: str) -> str:
    (row,) = (row for row in record.outcome.last if row.mixer == mixer)
    return page_of(record.task_kind).failing(record, row)


def _cells(found: Mapping[str, Summary], *, works: bool) -> list[Any]:
    mean = {key: each.mean for key, each in found.items()}
    low, high = mean["energy_low_uj"], mean["energy_high_uj"]
    energy, dense = mean["energy_uj"], mean["dense_energy_uj"]
    fires = mean["firing_rate"] is not None and (mean["silent"] or 0.0) <= DEAD and works
    times = dense / energy if fires and energy and dense else None
    one_value = low is None or high is None or low == high
    return [
        _spread(found["firing_rate"], 4),
        Cell(mean["silent"], formats.percent(mean["silent"], 0), style="soft"),
        mean["sops"],
        mean["macs"],
        _spread(found["energy_uj"], formats.places(energy or 0.0, 3)),
        None if one_value else f"{formats.three_digits(low)} to {formats.three_digits(high)}",
        Cell(dense, formats.three_digits(dense)),
        Cell(times, formats.MISSING if times is None else f"{times:.1f}"),
    ]


def _spread(summary: Summary, decimals: int) -> Cell:
    if summary.mean is None:
        return Cell(None, formats.MISSING)
    spread = "" if not summary.sd else f" ± {summary.sd:.{decimals}f}"
    return Cell(summary.mean, f"{summary.mean:.{decimals}f}{spread}")
