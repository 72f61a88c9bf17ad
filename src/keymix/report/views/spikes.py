# SPDX-License-Identifier: Apache-2.0
"""What spikes cost, on the page and at the terminal: one row a mixer of a spiking model."""

from __future__ import annotations

from dataclasses import dataclass

from keymix.analysis.statistics import Summary
from keymix.report import formats
from keymix.report.part import page_of
from keymix.report.record import ComparisonRecord, MixerSpikes

DEAD = 0.9
"""Share of silent neurons above which a network is not held against one without spikes."""
FAILING = "these rates and energies say nothing of models that work."
"""What is said of a mixer whose models do not work, behind the reason."""


@dataclass(frozen=True, kw_only=True)
class SpikeRow:
    """A mixer in the table of spikes, its quantities in words with their spread over seeds.

    Args:
        mixer: Its label.
        found: The quantities.
        notes: What is out of the ordinary.
        times: How many times more energy the network without spikes takes; None where that means
            nothing.
        rate_told: Spikes per neuron and step; the next ones are of the other quantities.
        silent_told: Share of neurons that never fired.
        sops_told: Synaptic operations.
        macs_told: Multiply-adds that are left.
        energy_told: Energy.
        bounds_told: Its bounds.
        dense_told: Energy of the network without spikes.
        times_told: How many times more that is.
    """

    mixer: str
    found: MixerSpikes
    notes: list[str]
    times: float | None
    rate_told: str
    silent_told: str
    sops_told: str
    macs_told: str
    energy_told: str
    bounds_told: str
    dense_told: str
    times_told: str


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The table of spikes: how it was measured, a row a mixer, and mixers by note."""

    text: str
    rows: list[SpikeRow]
    notes: dict[str, list[str]]


def sheet(record: ComparisonRecord) -> Sheet | None:
    """Make the table of spikes; ``None`` where the model has none, and for records of before."""
    told = record.spikes
    if not told:
        return None
    page = page_of(record.task_kind)
    scored = {row.mixer: row for row in record.outcome.last}
    rows = []
    for label, found in told.mixers.items():
        why = page.failing(record, scored[label])
        notes = [*found.notes, *([f"{why[0].upper()}{why[1:]}: {FAILING}"] if why else [])]
        rows.append(_row(label, found, notes, works=not why))
    by_note = {
        note: [row.mixer for row in rows if note in row.notes] for row in rows for note in row.notes
    }
    return Sheet(text=told.text, rows=rows, notes=by_note)


def steps_of(record: ComparisonRecord) -> dict[str, int]:
    """Return the time steps T of each spiking model, all of which its multiply-adds count.

    Args:
        record: A comparison's; of one before costs had T, its spikes do.

    Returns:
        T by label; nothing where the model has no spikes.
    """
    if not record.spikes:
        return {}
    of_costs = {label: row.time_steps for label, row in record.costs.items()}
    read = {label: row.time_steps for label, row in record.spikes.mixers.items()}
    both = {label: of_costs.get(label) or steps for label, steps in read.items()}
    return {label: steps for label, steps in both.items() if steps}


def dense_over(record: ComparisonRecord) -> tuple[str, dict[str, str]]:
    """Say over how many steps multiply-adds are counted, for the head of their column.

    Args:
        record: A comparison's.

    Returns:
        "dense, T=4", empty where the model has no spikes; and by label what to say in the cells of
        those with another T, such as the twin.
    """
    steps = steps_of(record)
    if not record.spikes:
        return "", {}
    most = steps.get(record.baseline) or next(iter(steps.values()), None)
    others = {label: f"T={number}" for label, number in steps.items() if number != most}
    return ("dense, all T" if most is None else f"dense, T={most}"), others


def _row(mixer: str, found: MixerSpikes, notes: list[str], *, works: bool) -> SpikeRow:
    """Write the quantities of a row, each with its spread over seeds."""
    low, high = found.energy_low_uj.mean, found.energy_high_uj.mean
    energy, dense = found.energy_uj, found.dense_energy_uj.mean
    silent = found.silent.mean or 0.0
    fires = found.firing_rate.mean is not None and silent <= DEAD and works
    times = dense / energy.mean if fires and energy.mean and dense else None
    return SpikeRow(
        mixer=mixer,
        found=found,
        notes=notes,
        times=times,
        rate_told=_spread(found.firing_rate, 4),
        silent_told=formats.percent(found.silent.mean, 0),
        sops_told=formats.count(found.sops.mean),
        macs_told=formats.count(found.macs.mean),
        energy_told=_spread(energy, _decimals(energy.mean or 0.0)),
        bounds_told=(
            formats.MISSING
            if low is None or high is None or low == high
            else f"{microjoules(low)} to {microjoules(high)}"
        ),
        dense_told=formats.MISSING if dense is None else microjoules(dense),
        times_told=formats.MISSING if times is None else f"{times:.1f}",
    )


def microjoules(value: float) -> str:
    """Write µJ with three digits."""
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0


def _spread(summary: Summary, decimals: int) -> str:
    if summary.mean is None:
        return formats.MISSING
    spread = "" if summary.sd is None else f" ± {summary.sd:.{decimals}f}"
    return f"{summary.mean:.{decimals}f}{spread}"
