# SPDX-License-Identifier: Apache-2.0
"""What the spikes of trained models cost: rates, operations, energy, on validation images.

They belong to a run's weights, not to a machine: ``spikes.json`` keeps them beside the hash of the
weights they were read from, and a comparison that goes on reads the other runs alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.analysis import statistics
from keymix.compare.folder import SPIKES
from keymix.compare.plan import Plan
from keymix.compare.runs import Reading
from keymix.compare.worker import FAILURES, reason
from keymix.errors import UserError

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
_ROW = {*QUANTITIES, "weights", "images", "time_steps", "notes"}
_PJ = 1e-6  # µJ
NOT_YET = "not measured yet: `keymix compare` does it when it ends"

Row = dict[str, Any]


def settled(
    plan: Plan, images: ImageData, readings: Sequence[Reading], *, say: Callable[[str], None]
) -> dict[str, Any] | None:
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
    left = [name for name, row in runs.items() if "note" in row]
    if left:
        say(f"counting spikes of {len(left)} {'run' if len(left) == 1 else 'runs'}")
    for name in left:
        try:
            runs[name] = _study(plan.out / name, images)
        except FAILURES as error:  # UserError included: a mixer of the user's may do what none does
            runs[name] = {"note": reason(error)}
        whole = {each: row for each, row in runs.items() if "note" not in row}
        write_json(plan.out / SPIKES, {"runs": _read(plan.out / SPIKES) | whole})
    return runs


def known(plan: Plan, readings: Sequence[Reading]) -> dict[str, Any] | None:
    """Return what the spikes of every finished run cost as far as it is known; nothing is measured.

    Returns:
        Rows by the run's folder; one with a ``note`` alone says why it is not known. ``None`` where
        the model has no spikes.
    """
    if not plan.spiking:
        return None
    kept = _read(plan.out / SPIKES)
    runs = {}
    for name in _finished(plan, readings):
        row = kept.get(name)
        fresh = row is not None and row["weights"] == _hash(plan.out / name)
        runs[name] = row if row is not None and fresh else {"note": NOT_YET}
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
    costs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any] | None:
    """Make what the record tells of spikes: the mean of each mixer over its seeds.

    Args:
        plan: The comparison.
        readings: Its runs.
        runs: What `settled` or `known` returned.
        costs: Every mixer's cost, for the multiply-adds of the twin.

    Returns:
        ``text`` (how it was measured), ``mixers`` (label to quantities, each n, mean and sd, and
        notes) and ``runs``; ``None`` where the model has no spikes.
    """
    if runs is None:
        return None
    from keymix.analysis.energy import ENERGIES

    cost = ENERGIES["fp32"]
    rows: dict[str, list[Row]] = {label: [] for label in plan.labels}
    notes: dict[str, list[str]] = {label: [] for label in plan.labels}
    finished = {r.run["folder"]: r.run["mixer"] for r in readings if r.answers is not None}
    for name, label in finished.items():
        row = runs.get(name)
        if row is None:
            continue
        if "note" in row:
            notes[label].append(row["note"])
        else:
            rows[label].append(row)
    twins = {e.label: _twin(costs[e.label]["macs"], cost.mac) for e in plan.entrants if e.twin_of}
    mixers = {}
    for label in plan.labels:
        found = [twins[label]] if label in twins else rows[label]
        mixers[label] = {
            **{
                key: asdict(
                    statistics.summarize([row[key] for row in found if row[key] is not None])
                )
                for key in QUANTITIES
            },
            "time_steps": found[0]["time_steps"] if found else None,
            "notes": list(dict.fromkeys([*notes[label], *_dead(rows[label])])),
        }
    told = {
        name: twins[label] if label in twins else runs[name]
        for name, label in finished.items()
        if label in twins or "note" not in runs.get(name, {"note": NOT_YET})
    }
    read = [row["images"] for found in rows.values() for row in found]
    text = _text(cost.mac, cost.ac, images=read[0] if read else IMAGES)
    return {"text": text, "mixers": mixers, "runs": told}


def _twin(macs: float | None, pj: float) -> Row:
    """Return the row of a network without spikes: multiply-adds alone."""
    energy = None if macs is None else macs * pj * _PJ
    same = dict.fromkeys(
        ("energy_uj", "energy_low_uj", "energy_high_uj", "dense_energy_uj"), energy
    )
    return {
        **dict.fromkeys(("firing_rate", "silent", "sops", "time_steps")),
        "macs": macs,
        **same,
    }


def _dead(rows: Sequence[Row]) -> list[str]:
    """Say so where hardly any neuron fires."""
    return [note for row in rows for note in row["notes"]]


def _text(mac: float, ac: float, *, images: int) -> str:
    return (
        f"Read from the weights of the last epoch on {images} validation images, the same for all; "
        "of several seeds the mean. A spike costs an addition for each weight that it meets (a "
        f"synaptic operation), {ac:g} pJ; a layer with real-valued input, such as the first, makes "
        f"all its multiply-adds, {mac:g} pJ each (32-bit floating point, 45 nm, Horowitz 2014). "
        "Where shortcuts add spikes, inputs above 1 leave bounds: at least one addition, at most a "
        "multiply-add. Batch norm is folded, memory access is not counted. “Without spikes” is the "
        "same network making every multiply-add at one step; the multiply-adds of the cost table "
        "are those of all steps, as if no input were a spike. docs/spikes.md tells each assumption."
    )


def _finished(plan: Plan, readings: Sequence[Reading]) -> list[str]:
    """Return the folders of the finished runs that have spikes."""
    twins = {entrant.label for entrant in plan.entrants if entrant.twin_of}
    return [
        reading.run["folder"]
        for reading in readings
        if reading.answers is not None and reading.run["mixer"] not in twins
    ]


def _study(folder: Path, images: ImageData) -> Row:
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
    silent = found.silent
    return {
        "weights": _hash(folder),
        "images": found.images,
        "time_steps": found.time_steps,
        "firing_rate": found.rate,
        "silent": silent,
        "sops": found.sops,
        "macs": found.macs,
        "energy_uj": middle * _PJ,
        "energy_low_uj": low * _PJ,
        "energy_high_uj": high * _PJ,
        "dense_energy_uj": found.twin_energy * _PJ,
        "notes": [note for note in found.notes if "never fired" in note],
    }


def _hash(folder: Path) -> str:
    from keymix.train.files import weights_file

    try:
        return hashlib.sha256((folder / weights_file("last")).read_bytes()).hexdigest()
    except OSError:
        return ""  # of a run whose weights were moved away; its scores are read still


def _read(path: Path) -> dict[str, Row]:
    """Return what is kept; a file that is missing or damaged keeps nothing."""
    from keymix.train.files import read_json

    try:
        runs = read_json(path).get("runs")
    except UserError:
        return {}
    if not isinstance(runs, dict):
        return {}
    return {name: row for name, row in runs.items() if _is_row(row)}


def _is_row(row: object) -> bool:
    """Whether a run's row is as `_study` makes it."""
    if not isinstance(row, dict) or not row.keys() >= _ROW:
        return False
    numbers = [row[key] for key in (*QUANTITIES, "time_steps")]
    notes = row["notes"]
    return (
        all(value is None or (type(value) in (int, float) and isfinite(value)) for value in numbers)
        and isinstance(row["weights"], str)
        and type(row["images"]) is int
        and isinstance(notes, list)
        and all(isinstance(note, str) for note in notes)
    )
