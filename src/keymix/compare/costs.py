# SPDX-License-Identifier: Apache-2.0
"""What each mixer costs: counted, and measured alone after training; and what its spikes cost.

``costs.json`` keeps the measurements with the machine and versions they hold for. Mixers that join
later are measured alone, with the batches of those before. On another machine, or with other
versions or threads, all are measured again, so that one table never mixes two settings.
Spikes belong to a run's weights, not to a machine: ``spikes.json`` keeps what they cost with the
hash of the weights they were read from, and a resumed comparison reads the other runs alone.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keymix.analysis import statistics
from keymix.analysis.counting import count
from keymix.analysis.energy import ENERGIES
from keymix.analysis.measure import measure_interleaved, training_quartiles_ms, with_peak
from keymix.analysis.memory import Build, peak_memory, run_pass
from keymix.analysis.passes import example_for, passes_of
from keymix.analysis.spikes import spike_study
from keymix.compare.executor import FAILURES, reason
from keymix.compare.pictures import evenly, normalised
from keymix.compare.plan import Plan, PlannedMixer, input_shape
from keymix.compare.runs import Finished, Reading
from keymix.data.dataset import ImageData
from keymix.data.record import DataRecord
from keymix.errors import KeymixWarning, UserError
from keymix.records import from_json, to_json
from keymix.report.record import (
    ComparisonRecord,
    CostRow,
    Lines,
    Measured,
    MeasuredAt,
    MixerSpikes,
    Number,
    RunSpikes,
    Spikes,
    differing,
)
from keymix.train.environment import environment, lines
from keymix.train.files import read_json, weights_file, write_json
from keymix.train.model import device_of_this_machine, model_for
from keymix.train.recipe import from_dict
from keymix.train.runs import load_run

COSTS, SPIKES = "costs.json", "spikes.json"
NOT_YET = "not measured yet: `keymix compare` does it when it ends"
Say = Callable[[str], None]
"""Gets what is measured, before it is."""

BATCH_SIZE, REPEATS, FEWEST = 64, 20, 7
BATCH_SECONDS = 4.0
"""A batch is made smaller until it takes less than about so long."""
BUDGET_SECONDS = 30.0
"""Timing of all mixers together takes less than about so long, at seven rounds at least."""
PEAK_SECONDS = 1.5
"""About what the fresh process takes that measures a model's peak memory."""

IMAGES, BATCH = 32, 8
"""Validation images of a study of spikes, and how many at a time."""
STUDY = 4.0
"""Time of a study over that of evaluating its images."""

Table = Mapping[str, CostRow]
"""Costs by mixer's label."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How many images a batch has and how many rounds are taken, the same for all mixers."""

    batch_size: int
    repeats: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Store:
    """The content of ``costs.json``: costs, and machine, versions, threads and effort of them."""

    setting: Lines
    effort: Effort
    costs: Table

    def __post_init__(self) -> None:
        if not self.setting.get("threads", "").isdecimal():
            raise UserError("setting.threads is no number")


def measured_costs(
    plan: Plan, data: DataRecord, *, trained: Collection[str], say: Say
) -> tuple[Table, Measured]:
    """Return every mixer's cost: as kept in the folder, or counted and measured now, and kept.

    With it comes the record of how costs were measured. Training steps are timed of the mixers that
    have `trained`: one that ended its worker would end this process.
    """
    threads = _threads(plan)
    setting, kept = _setting(threads), _read_costs(plan)
    changed = differing([kept.setting, setting]) if kept else []
    rows: dict[str, CostRow] = {}
    if kept is not None and not changed:
        rows |= kept.costs
    left = [mixer for mixer in plan.mixers if mixer.label not in rows]
    if left or kept is None:
        names = ", ".join(mixer.label for mixer in left)
        again = f"measuring cost again, since it was measured with other {', '.join(changed)}"
        say(again if changed else f"measuring cost: {names}")
        effort = kept.effort if kept and not changed else None
        made, effort = measure(plan, left, data, trained=trained, threads=threads, effort=effort)
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        rows |= {label: replace(row, measured=now) for label, row in made.items()}
        whole = {label: row for label, row in rows.items() if row.latency_ms is not None}
        kept = Store(setting=setting, effort=effort, costs=whole)
        write_json(plan.out / COSTS, kept)
    table = {label: rows[label] for label in plan.labels}
    return table, _how(kept, table)


def unmeasured(plan: Plan) -> list[str]:
    """Return the labels of the mixers that `measured_costs` would measure."""
    kept = _read_costs(plan)
    if kept is None or kept.setting != _setting(_threads(plan)):
        return list(plan.labels)
    return [label for label in plan.labels if label not in kept.costs]


def known_costs(
    plan: Plan, data: DataRecord, before: ComparisonRecord | None
) -> tuple[Table, Measured]:
    """Return every mixer's cost as far as it is known, and measure nothing.

    The costs of an earlier record are taken where the folder keeps none.
    """
    kept = _read_costs(plan)
    rows: dict[str, CostRow] = {}
    if (there := kept or before) is not None:
        rows |= there.costs
    left = [mixer for mixer in plan.mixers if mixer.label not in rows]
    builds = _builds(plan, left, data)
    for mixer in left:
        try:
            row = _counted(mixer, builds[mixer.label].make(), data)
        except FAILURES as error:  # a mixer of the user's may be gone
            row = CostRow.unknown(mixer.params, note=f"not counted: {reason(error)}")
        rows[mixer.label] = replace(row, note=f"{row.note}; {NOT_YET}" if row.note else NOT_YET)
    table = {label: rows[label] for label in plan.labels}
    if kept:
        return table, _how(kept, table)
    if before:
        return table, before.measured
    return table, Measured(device="cpu", batch_size=BATCH_SIZE, repeats=0, threads=0)


def _threads(plan: Plan) -> int:
    """How many CPU threads a measurement has; on a GPU those of a run, for its host's part."""
    return plan.threads if device_of_this_machine().type == "cuda" else 1


def _setting(threads: int) -> Lines:
    return {**lines(environment()), "threads": str(threads)}


def _read_costs(plan: Plan) -> Store | None:
    """Return what is kept; a file that is missing or damaged keeps nothing."""
    path = plan.out / COSTS
    if not path.exists():
        return None
    try:
        return from_json(Store, read_json(path), where=repr(str(path)))
    except UserError as error:
        wrong = str(error).rstrip(".")
    text = f"{wrong}; it is not used, and `keymix compare` measures again"
    warnings.warn(text, KeymixWarning, stacklevel=3)
    return None


def _how(kept: Store, table: Table) -> Measured:
    """Say how and when the costs of a table were measured."""
    setting, effort = kept.setting, kept.effort
    threads = int(setting["threads"])
    times: dict[str, list[str]] = {}
    for label, row in table.items():
        if row.measured:
            times.setdefault(row.measured, []).append(label)
    return Measured(
        device="cuda" if "device" in setting else "cpu",
        batch_size=effort.batch_size,
        repeats=effort.repeats,
        threads=threads,
        setting=setting,
        when=tuple(
            MeasuredAt(measured=when, mixers=tuple(labels))
            for when, labels in sorted(times.items())
        ),
    )


# ---- counting and measuring -----------------------------------------------------------------


def measure(
    plan: Plan,
    mixers: Sequence[PlannedMixer],
    data: DataRecord,
    *,
    trained: Collection[str],
    threads: int,
    effort: Effort | None = None,
) -> tuple[dict[str, CostRow], Effort]:
    """Count and measure the models of some mixers; the effort is chosen if none is given.

    Latencies are taken in turns in one process, so that a machine that drifts is unfair to none.
    """
    shape = input_shape(data)
    builds = _builds(plan, mixers, data)
    device = device_of_this_machine()
    models = {label: build.make().to(device) for label, build in builds.items()}
    broken = {label: why for label, each in models.items() if (why := _breaks(each, data))}
    sound = {label: model for label, model in models.items() if label not in broken}
    effort = effort or _effort(list(sound.values()), data, threads)
    measured = {}
    if sound:
        measured = measure_interleaved(
            sound,
            shape,
            batch_size=effort.batch_size,
            repeats=effort.repeats,
            threads=threads,
            task=data.task,
        )
    if sound and device.type == "cpu":
        chosen = {label: builds[label] for label in sound}
        peaks = peak_memory(
            chosen, shape, batch_size=effort.batch_size, threads=threads, phases=("training",)
        )
        measured = {label: with_peak(cost, peaks[label]) for label, cost in measured.items()}
    batch = min(plan.recipe.data.batch_size, effort.batch_size)
    able = {label: model for label, model in sound.items() if label in trained}
    steps = _training_steps(able, data, batch_size=batch, threads=threads)
    table: dict[str, CostRow] = {}
    for mixer in mixers:
        label = mixer.label
        if label in broken:
            note = f"its model does not run: {broken[label]}"
            table[label] = CostRow.unknown(mixer.params, note=note)
            continue
        row, cost = _counted(mixer, models[label], data), measured[label]
        low, step, high = steps.get(label, (None, None, None))
        notes = [row.note] if row.note else []
        if cost.busy:
            notes.append("times: the machine was busy while they were measured")
        if cost.peak_mib is None:
            notes.append(f"peak memory: {cost.peak_note}")
        table[label] = replace(
            row,
            latency_ms=cost.latency_ms,
            latency_low_ms=cost.latency_q1_ms,
            latency_high_ms=cost.latency_q3_ms,
            images_per_s=cost.images_per_s,
            peak_mib=cost.peak_mib,
            step_low_ms=low,
            step_ms=step,
            step_high_ms=high,
            note="; ".join(notes),
        )
    return table, effort


def _training_steps(
    models: Mapping[str, nn.Module], data: DataRecord, *, batch_size: int, threads: int
) -> dict[str, tuple[float, float, float]]:
    """Time a training step of the models that can make one: quartiles, milliseconds."""
    shape, passes = input_shape(data), passes_of(data.task)
    able = {}
    for label, model in models.items():
        try:
            x = example_for(model, passes, shape, batch_size)
            run_pass(model.train(), x, "training", passes=passes)
        except FAILURES:  # a mixer of the user's may fail in training mode alone
            continue
        able[label] = model
    if not able:
        return {}
    return training_quartiles_ms(
        able,
        shape,
        batch_size=batch_size,
        seconds=BUDGET_SECONDS / 2,
        threads=threads,
        task=data.task,
    )


def _counted(mixer: PlannedMixer, model: nn.Module, data: DataRecord) -> CostRow:
    row = CostRow.unknown(mixer.params, note="")
    try:
        found = count(model, input_shape(data), task=data.task)
    except FAILURES as error:  # a mixer of the user's may fail in training mode alone
        return replace(row, note=f"not counted: {reason(error)}")
    return replace(
        row,
        macs=found.macs,
        activation_bytes=found.activation_bytes,
        time_steps=found.time_steps,
        note=f"multiply-adds without {', '.join(found.uncounted)}" if found.uncounted else "",
    )


def model_of(recipe: Mapping[str, Any], data: object) -> nn.Module:
    """Build the model of a recipe for data, both as plain values; another process does so, too."""
    return model_for(from_dict(recipe), from_json(DataRecord, data, where="the record of the data"))


def _builds(plan: Plan, mixers: Sequence[PlannedMixer], data: DataRecord) -> dict[str, Build]:
    return {
        mixer.label: Build(
            factory="keymix.compare.costs:model_of",
            kwargs={"recipe": plan.recipe_for(mixer, 0).to_dict(), "data": to_json(data)},
            imports=plan.imports,
            task=data.task,
        )
        for mixer in mixers
    }


def _breaks(model: nn.Module, data: DataRecord) -> str | None:
    """Say why a model cannot run on one image; ``None`` if it can."""
    model.eval()
    try:
        with torch.inference_mode():
            model(example_for(model, passes_of(data.task), input_shape(data), 1))
    except FAILURES as error:
        return reason(error)
    return None


def _effort(models: Sequence[nn.Module], data: DataRecord, threads: int) -> Effort:
    """Choose batch size and rounds, so that large models are measured in sensible time too."""
    seconds = 1e-5
    if models:  # the fastest of a few passes: a busy machine slows any of them
        trial = measure_interleaved(
            {str(i): model for i, model in enumerate(models)},
            input_shape(data),
            batch_size=1,
            repeats=3,
            warmup=1,
            threads=threads,
            task=data.task,
        )
        seconds = max(cost.latency_q1_ms for cost in trial.values()) / 1e3
    return _effort_for(seconds, len(models))


def _effort_for(seconds: float, models: int) -> Effort:
    """Return the effort for models, the slowest of which takes these seconds per image."""
    batch = 2 ** int(max(0.0, min(math.log2(BATCH_SIZE), math.log2(BATCH_SECONDS / seconds))))
    rounds = int(BUDGET_SECONDS / (max(1, models) * (batch / 2 + 1) * seconds))
    return Effort(batch_size=batch, repeats=max(FEWEST, min(REPEATS, rounds)))


def expected_seconds(image_seconds: Sequence[float]) -> float:
    """Return about how long `measure` will take, from each model's seconds of one image."""
    if not image_seconds:
        return 0.0
    models, slowest = len(image_seconds), max(image_seconds)
    effort = _effort_for(max(slowest, 1e-5), models)
    steps = BUDGET_SECONDS / 2 + 3 * BATCH_SIZE * sum(image_seconds)
    rounds = (effort.repeats + 3) * (effort.batch_size + 1) * sum(image_seconds)
    return rounds + steps + PEAK_SECONDS * models


# ---- spikes ---------------------------------------------------------------------------------


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
"""What is read of each run; energies in µJ per image, the last of the network without spikes."""
_PJ = 1e-6  # µJ

SpikeRows = Mapping[str, RunSpikes | str]
"""What a run's spikes cost, or why that is not known, by the run's folder."""


def measured_spikes(
    plan: Plan, images: ImageData, readings: Sequence[Reading], *, say: Say
) -> SpikeRows | None:
    """Return what the spikes of every finished run cost: as kept in the folder, or read now.

    None where the model has no spikes.
    """
    found = known_spikes(plan, readings)
    if found is None:
        return None
    runs = dict(found)
    left = [name for name, row in runs.items() if isinstance(row, str)]
    if left:
        say(f"counting spikes of {len(left)} {'run' if len(left) == 1 else 'runs'}")
    for name in left:
        try:
            runs[name] = _study(plan.out / name, images)
        except FAILURES as error:  # UserError included: a mixer of the user's may do what none does
            runs[name] = reason(error)
        whole = {each: row for each, row in runs.items() if isinstance(row, RunSpikes)}
        write_json(plan.out / SPIKES, {"runs": _read_spikes(plan) | whole})
    return runs


def known_spikes(plan: Plan, readings: Sequence[Reading]) -> SpikeRows | None:
    """Return what the spikes of every finished run cost as far as it is known; None without any."""
    if not plan.spiking:
        return None
    kept = _read_spikes(plan)
    ann_labels = {each.label for each in plan.mixers if each.ann_of or each.reference}
    done = (reading.run for reading in readings if isinstance(reading, Finished))
    runs: dict[str, RunSpikes | str] = {}
    for name in (run.folder for run in done if run.mixer not in ann_labels):
        row = kept.get(name)
        fresh = row is not None and row.weights == _hash(plan.out / name)
        runs[name] = row if row is not None and fresh else NOT_YET
    return runs


def expected_spike_seconds(plan: Plan, image_seconds: Mapping[str, float]) -> float:
    """Return about how long `measured_spikes` takes, from each mixer's seconds of one image."""
    if not plan.spiking:
        return 0.0
    spiking = sum(image_seconds[mixer.label] for mixer in plan.mixed if not mixer.ann_of)
    return STUDY * IMAGES * len(plan.seeds) * spiking


def spike_table(
    plan: Plan,
    readings: Sequence[Reading],
    runs: SpikeRows | None,
    costs: Table,
) -> Spikes | None:
    """Make what the record has of spikes: the mean of each mixer over its seeds.

    The multiply-adds of the ANN counterpart come from `costs`. None where the model has no spikes.
    """
    if runs is None:
        return None

    cost = ENERGIES["fp32"]
    finished = {r.run.folder: r.run.mixer for r in readings if isinstance(r, Finished)}
    ann_rows = {e.label: _ann_row(costs[e.label].macs, cost.mac) for e in plan.mixers if e.ann_of}
    mixers = {}
    for label in (each.label for each in plan.mixed):
        mine = [runs.get(name) for name, owner in finished.items() if owner == label]
        rows = [row for row in mine if isinstance(row, RunSpikes)]
        found = [ann_rows[label]] if label in ann_rows else rows
        unknown = [why for why in mine if isinstance(why, str)]
        odd = [note for row in rows for note in row.notes or ()]  # that few neurons fire
        mixers[label] = MixerSpikes(
            **{key: statistics.summarize(_each(found, key)) for key in QUANTITIES},
            time_steps=found[0].time_steps if found else None,
            notes=tuple(dict.fromkeys([*unknown, *odd])),
        )
    each = {name: ann_rows.get(label, runs.get(name)) for name, label in finished.items()}
    read = (row.images for row in runs.values() if isinstance(row, RunSpikes))
    return Spikes(
        images=next(read, None) or IMAGES,
        mac_pj=cost.mac,
        ac_pj=cost.ac,
        mixers=mixers,
        runs={name: row for name, row in each.items() if isinstance(row, RunSpikes)},
    )


def _each(rows: Sequence[RunSpikes], key: str) -> list[float]:
    values = (getattr(row, key) for row in rows)
    return [value for value in values if value is not None]


def _ann_row(macs: Number | None, pj: float) -> RunSpikes:
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


def _study(folder: Path, images: ImageData) -> RunSpikes:
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
        dense_energy_uj=found.ann_energy * _PJ,
        notes=tuple(note for note in found.notes if "never fired" in note),
    )


def _hash(folder: Path) -> str:
    try:
        return hashlib.sha256((folder / weights_file("last")).read_bytes()).hexdigest()
    except OSError:
        return ""  # of a run whose weights were moved away; its scores are still read


def _read_spikes(plan: Plan) -> dict[str, RunSpikes]:
    """Return what is kept; a file, or a run's row, that is missing or damaged keeps nothing."""
    path = plan.out / SPIKES
    try:
        runs = read_json(path).get("runs")
    except UserError:
        return {}
    found = {}
    for name, row in runs.items() if isinstance(runs, dict) else ():
        with suppress(UserError):
            read = from_json(RunSpikes, row, where=f"{str(path)!r}: {name}")
            if None not in (read.weights, read.images, read.notes):  # else of a network without
                found[name] = read
    return found
