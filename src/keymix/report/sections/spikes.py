# SPDX-License-Identifier: Apache-2.0
"""What spikes cost: one row per mixer of a spiking model, on the page and at the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keymix.analysis.statistics import Summary
from keymix.report import formats
from keymix.report.part import Section, Shown, page_of
from keymix.report.record import MixerSpikes, Results
from keymix.report.tables import Cell, Column, Table
from keymix.report.words import say

PLACE = 30

DEAD = 0.9
"""Share of silent neurons above which a network is not compared with one without spikes."""
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
            about=say("spikes", record),
            tables=[table(record)],
            notes=[(labels, note) for note, labels in notes(record).items()],
        )


def table(record: Results) -> Table:
    """Make the table of spikes: quantities with their spread over seeds; energies in µJ."""
    mixers = {} if record.spikes is None else record.spikes.mixers
    title = "Firing rates, operations and energy of each mixer’s trained models"
    rows = [
        [label, *_cells(found, works=not _failing(record, label))]
        for label, found in mixers.items()
    ]
    return Table("spikes", title, COLUMNS, rows)


def notes(record: Results) -> dict[str, list[str]]:
    """Return what is out of the ordinary, with the mixers that it is said of."""
    found: dict[str, list[str]] = {}
    for label, spikes in (record.spikes.mixers if record.spikes else {}).items():
        why = _failing(record, label)
        for note in (*spikes.notes, *([f"{why[0].upper()}{why[1:]}: {FAILING}"] if why else [])):
            found.setdefault(note, []).append(label)
    return found


def _failing(record: Results, mixer: str) -> str:
    (row,) = (row for row in record.outcome.last if row.mixer == mixer)
    return page_of(record.task_kind).failing(record, row)


def _cells(found: MixerSpikes, *, works: bool) -> list[Any]:
    low, high = found.energy_low_uj.mean, found.energy_high_uj.mean
    energy, dense = found.energy_uj, found.dense_energy_uj.mean
    fires = found.firing_rate.mean is not None and (found.silent.mean or 0.0) <= DEAD and works
    times = dense / energy.mean if fires and energy.mean and dense else None
    one_value = low is None or high is None or low == high
    return [
        _spread(found.firing_rate, 4),
        Cell(found.silent.mean, formats.percent(found.silent.mean, 0), style="soft"),
        found.sops.mean,
        found.macs.mean,
        _spread(energy, formats.places(energy.mean or 0.0, 3)),
        None if one_value else f"{formats.three_digits(low)} to {formats.three_digits(high)}",
        Cell(dense, formats.three_digits(dense)),
        Cell(times, formats.MISSING if times is None else f"{times:.1f}"),
    ]


def _spread(summary: Summary, decimals: int) -> Cell:
    if summary.mean is None:
        return Cell(None, formats.MISSING)
    spread = "" if summary.sd is None else f" ± {summary.sd:.{decimals}f}"
    return Cell(summary.mean, f"{summary.mean:.{decimals}f}{spread}")
