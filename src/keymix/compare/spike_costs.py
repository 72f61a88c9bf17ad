# SPDX-License-Identifier: Apache-2.0
"""What the spikes of trained models cost: rates, operations, energy, on validation images.

They belong to a run's weights, not to a machine: ``spikes.json`` keeps them beside the hash of the
weights they were read from, and a comparison that goes on reads the other runs alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.analysis import statistics
from keymix.compare.executor import FAILURES
from keymix.compare.folder import SPIKES
from keymix.compare.plan import Plan
from keymix.compare.runs import Finished, Reading
from keymix.compare.worker import reason
from keymix.errors import UserError
from keymix.records import from_json
from keymix.report.record import CostRow, MixerSpikes, Number, RunSpikes, Spikes

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

IMAGES, BATCH = 32, 8
"""Validation images of a study, and how many at a time."""
STUDY = 4.0
"""Time of a study over that of evaluating its images."""

QUANTITIES = (
    "firing_rate",
    "silent",
    "sops",
    "macs",
    "energy_uj",
    "energy_low_uj",
    "energy_high_uj",
    "dense_energy_uj",
)
"""What is read of each run; energies in µJ an image, the last of the network without spikes."""
_PJ = 1e-6  # µJ
NOT_YET = "not measured yet: `keymix compare` does it when it ends"

Row = RunSpikes | str
"""What a run's spikes cost, or why that is not known."""


def settled(
    plan: Plan, images: ImageData, readings: Sequence[Reading], *, say: Callable[[str], None]
) -> dict[str, Row] | None:
    """Return what the spikes of every finished run cost: as kept in the folder, or read now.

    Args:
        plan: The comparison.
        images: Its images.
        readings: Its runs.
        say: Called with what is read, before it is.

    Returns:
        Rows by the run's folder (see `known`); ``None`` where the model has no spikes.
    """
    if not plan.spiking:
        return None
    from keymix.train.files import write_json

    runs = known(plan, readings) or {}
    left = [name for name, row in runs.items() if isinstance(row, str)]
    if left:
        say(f"counting spikes of {len(left)} {'run' if len(left) == 1 else 'runs'}")
    for name in left:
        try:
            runs[name] = _study(plan.out / name, images)
        except FAILURES as error:  # UserError included: a mixer of the user's may do what none does
            runs[name] = reason(error)
        whole = {each: row for each, row in runs.items() if isinstance(row, RunSpikes)}
        write_json(plan.out / SPIKES, {"runs": _read(plan.out / SPIKES) | whole})
    return runs


def known(plan: Plan, readings: Sequence[Reading]) -> dict[str, Row] | None:
    """Return what the spikes of every finished run cost as far as it is known; nothing is measured.

    Returns:
        Rows by the run's folder; ``None`` where the model has no spikes.
    """
    if not plan.spiking:
        return None
    kept = _read(plan.out / SPIKES)
    runs: dict[str, Row] = {}
    for name in _finished(plan, readings):
        row = kept.get(name)
        fresh = row is not None and row.weights == _hash(plan.out / name)
        runs[name] = row if row is not None and fresh else NOT_YET
    return runs


def expected_seconds(plan: Plan, image_seconds: Mapping[str, float]) -> float:
    """Return about how long `settled` will take, from seconds of one image by mixer."""
    if not plan.spiking:
        return 0.0
    spiking = sum(image_seconds[e.label] for e in plan.entrants if not e.twin_of)
    return STUDY * IMAGES * len(plan.seeds) * spiking


def table(
    plan: Plan,
    readings: Sequence[Reading],
    runs: Mapping[str, Row] | None,
    costs: Mapping[str, CostRow],
    *,
    inputs: str = "images",
) -> Spikes | None:
    """Make what the record has of spikes: the mean of each mixer over its seeds.

    Args:
        plan: The comparison.
        readings: Its runs.
        runs: What `settled` or `known` returned.
        costs: Every mixer's cost, for the multiply-adds of the twin.
        inputs: What the images are called.

    Returns:
        ``None`` where the model has no spikes.
    """
    if runs is None:
        return None
    from keymix.analysis.energy import ENERGIES

    cost = ENERGIES["fp32"]
    rows: dict[str, list[RunSpikes]] = {label: [] for label in plan.labels}
    notes: dict[str, list[str]] = {label: [] for label in plan.labels}
    finished = {r.run.folder: r.run.mixer for r in readings if isinstance(r, Finished)}
    for name, label in finished.items():
        row = runs.get(name)
        if isinstance(row, str):
            notes[label].append(row)
        elif row is not None:
            rows[label].append(row)
    twins = {e.label: _twin(costs[e.label].macs, cost.mac) for e in plan.entrants if e.twin_of}
    mixers = {}
    for label in plan.labels:
        found = [twins[label]] if label in twins else rows[label]
        mixers[label] = MixerSpikes(
            **{key: statistics.summarize(_each(found, key)) for key in QUANTITIES},
            time_steps=found[0].time_steps if found else None,
            notes=tuple(dict.fromkeys([*notes[label], *_notes(rows[label])])),
        )
    each = {name: twins.get(label, runs.get(name)) for name, label in finished.items()}
    read = [row.images for found in rows.values() for row in found]
    text = _text(cost.mac, cost.ac, images=read[0] or IMAGES if read else IMAGES, inputs=inputs)
    known_rows = {name: row for name, row in each.items() if isinstance(row, RunSpikes)}
    return Spikes(text=text, mixers=mixers, runs=known_rows)


def _each(rows: Sequence[RunSpikes], key: str) -> list[float]:
    values = (getattr(row, key) for row in rows)
    return [value for value in values if value is not None]


def _twin(macs: Number | None, pj: float) -> RunSpikes:
    """Return the row of a network without spikes: multiply-adds alone."""
    energy = None if macs is None else macs * pj * _PJ
    return RunSpikes(
        firing_rate=None,
        silent=None,
        sops=None,
        time_steps=None,
        macs=macs,
        energy_uj=energy,
        energy_low_uj=energy,
        energy_high_uj=energy,
        dense_energy_uj=energy,
    )


def _notes(rows: Sequence[RunSpikes]) -> list[str]:
    """Return what is out of the ordinary, such as that hardly any neuron fires."""
    return [note for row in rows for note in row.notes or ()]


def _text(mac: float, ac: float, *, images: int, inputs: str) -> str:
    return (
        f"Read from the weights of the last epoch on {images} validation {inputs}, the same for "
        "all; of several seeds the mean. A spike costs an addition for each weight that it meets "
        f"(a synaptic operation), {ac:g} pJ; a layer with real-valued input, such as the first, "
        f"makes all its multiply-adds, {mac:g} pJ each (32-bit floating point, 45 nm, Horowitz "
        "2014). "
        "Where shortcuts add spikes, inputs above 1 leave bounds: at least one addition, at most a "
        "multiply-add. Batch norm is folded, memory access is not counted. “Without spikes” is the "
        "same network making every multiply-add at one step; the multiply-adds of the cost table "
        "are those of all steps, as if no input were a spike. docs/spikes.md tells each assumption."
    )


def _finished(plan: Plan, readings: Sequence[Reading]) -> list[str]:
    """Return the folders of the finished runs that have spikes."""
    twins = {entrant.label for entrant in plan.entrants if entrant.twin_of}
    return [
        reading.run.folder
        for reading in readings
        if isinstance(reading, Finished) and reading.run.mixer not in twins
    ]


def _study(folder: Path, images: ImageData) -> RunSpikes:
    import torch

    from keymix.analysis.spikes import spike_study
    from keymix.compare.maps import evenly, normalised
    from keymix.train.model import device_of_this_machine
    from keymix.train.runs import load_run

    chosen = evenly(images.val, IMAGES)
    model = load_run(folder).model("last").to(device_of_this_machine())
    with torch.random.fork_rng(devices=[]):
        found = spike_study(model, normalised(images, images.val, chosen), batch_size=BATCH)
    low, middle, high = found.energy
    return RunSpikes(
        weights=_hash(folder),
        images=found.images,
        time_steps=found.time_steps,
        firing_rate=found.rate,
        silent=found.silent,
        sops=found.sops,
        macs=found.macs,
        energy_uj=middle * _PJ,
        energy_low_uj=low * _PJ,
        energy_high_uj=high * _PJ,
        dense_energy_uj=found.twin_energy * _PJ,
        notes=tuple(note for note in found.notes if "never fired" in note),
    )


def _hash(folder: Path) -> str:
    from keymix.train.files import weights_file

    try:
        return hashlib.sha256((folder / weights_file("last")).read_bytes()).hexdigest()
    except OSError:
        return ""  # of a run whose weights were moved away; its scores are read still


def _read(path: Path) -> dict[str, RunSpikes]:
    """Return what is kept; a file, or a run's row, that is missing or damaged keeps nothing."""
    from keymix.train.files import read_json

    try:
        runs = read_json(path).get("runs")
    except UserError:
        return {}
    found = {}
    for name, row in runs.items() if isinstance(runs, dict) else ():
        with suppress(UserError):
            found[name] = _whole(from_json(RunSpikes, row, where=f"{str(path)!r}: {name}"))
    return found


def _whole(row: RunSpikes) -> RunSpikes:
    """Refuse the row of a network without spikes, which no file keeps."""
    if row.weights is None or row.images is None or row.notes is None:
        raise UserError("it lacks the weights that it was read from, the images or the notes")
    return row
