# SPDX-License-Identifier: Apache-2.0
"""What each mixer costs: counted, and measured alone after training; and what its spikes cost.

``costs.json`` is a cache, with the machine, versions, model and input that its costs hold for.
Mixers that join later are measured alone, with the batches of those before. In another setting all
are measured again, so that one table never mixes two. Spikes belong to a run's weights, not to a
machine: they are kept with the hash of the weights that they were read from.
"""

from __future__ import annotations

import math
import time
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
from keymix.compare.models import input_shape
from keymix.compare.pictures import evenly, normalised, weights_hash
from keymix.compare.question import Plan, PlannedMixer
from keymix.compare.runs import Finished, Reading
from keymix.data.dataset import ImageData
from keymix.data.record import DataRecord
from keymix.errors import FAILURES, UserError, reason
from keymix.records import from_json, to_json
from keymix.report.record import (
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
from keymix.train.files import read_json, write_json
from keymix.train.model import device_of_this_machine, model_for
from keymix.train.recipe import from_dict
from keymix.train.runs import load_run

COSTS = "costs.json"
NOT_YET = "not measured yet: `keymix compare` does it when it ends"
Say = Callable[[str], None]
"""Gets what is measured, before it is."""

BATCH_SIZE, REPEATS, FEWEST = 64, 20, 7
BATCH_SECONDS = 4.0
"""A batch is made smaller until it takes less than about so long."""
BUDGET_SECONDS = 30.0
"""Timing of all mixers together takes less than about so long, at seven rounds at least."""

IMAGES, BATCH = 32, 8
"""Validation images of a study of spikes, and how many at a time."""

Table = Mapping[str, CostRow]
"""Costs by mixer's label."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How many images a batch has and how many rounds are taken, the same for all mixers."""

    batch_size: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The content of ``costs.json``."""

    setting: Lines  # machine, versions, threads, model and input that the costs hold for
    effort: Effort
    costs: Table
    spikes: Mapping[str, RunSpikes]  # by the run's folder


def measure_costs(plan: Plan, images: ImageData, readings: Sequence[Reading], *, say: Say) -> None:
    """Measure what the folder does not keep yet: costs of mixers, then the spikes of runs.

    Training steps are timed of the mixers that have trained: one that ended its process would end
    this one.
    """
    data, kept = images.record(), _read(plan)
    setting = _setting(plan, data)
    changed = differing([kept.setting, setting]) if kept else []
    rows = dict(kept.costs) if kept and not changed else {}
    left = [mixer for mixer in plan.mixers if mixer.label not in rows]
    if left or kept is None:
        names = ", ".join(mixer.label for mixer in left)
        again = f"measuring cost again, since it was measured with other {', '.join(changed)}"
        say(again if changed else f"measuring cost: {names}")
        trained = {each.run.mixer for each in readings if isinstance(each, Finished)}
        effort = kept.effort if kept and not changed else None
        made, effort = measure(plan, left, data, trained=trained, effort=effort)
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        rows |= {label: replace(row, measured=now) for label, row in made.items()}
        spikes = kept.spikes if kept else {}
        kept = Kept(setting=setting, effort=effort, costs=rows, spikes=spikes)
        write_json(plan.out / COSTS, kept)
    _measure_spikes(plan, images, readings, kept, say=say)


def known_costs(plan: Plan, data: DataRecord) -> tuple[Table, Measured]:
    """Return every mixer's cost as far as the folder keeps it, else counted; measure nothing.

    With it comes the record of how costs were measured.
    """
    kept = _read(plan)
    rows = dict(kept.costs) if kept else {}
    for mixer in plan.mixers:
        if mixer.label not in rows:
            try:
                row = _counted(mixer, model_for(plan.recipe_for(mixer, 0), data), data)
            except FAILURES as error:  # a mixer of the user's may be gone
                row = CostRow.unknown(mixer.params, note=f"not counted: {reason(error)}")
            rows[mixer.label] = replace(row, note=f"{row.note}; {NOT_YET}" if row.note else NOT_YET)
    table = {label: rows[label] for label in plan.labels}
    if kept:
        return table, _how(kept, table)
    return table, Measured(device="cpu", batch_size=BATCH_SIZE, repeats=0, threads=0)


def _threads(plan: Plan) -> int:
    """How many CPU threads a measurement has; on a GPU those of a run, for its host's part."""
    return plan.threads if device_of_this_machine().type == "cuda" else 1


def _setting(plan: Plan, data: DataRecord) -> Lines:
    return {
        **lines(environment()),
        "threads": str(_threads(plan)),
        "model": plan.recipe.model.name,
        "input": "×".join(map(str, input_shape(data))),
    }


def _read(plan: Plan) -> Kept | None:
    """Return what is kept; a file that is missing or damaged keeps nothing."""
    path = plan.out / COSTS
    with suppress(UserError):
        return from_json(Kept, read_json(path), where=repr(str(path)))
    return None


def _how(kept: Kept, table: Table) -> Measured:
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
    effort: Effort | None = None,
) -> tuple[dict[str, CostRow], Effort]:
    """Count and measure the models of some mixers; the effort is chosen if none is given.

    Latencies are taken in turns in one process, so that a machine that drifts is unfair to none.
    """
    shape, threads = input_shape(data), _threads(plan)
    builds = {mixer.label: _build(plan, mixer, data) for mixer in mixers}
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


def _build(plan: Plan, mixer: PlannedMixer, data: DataRecord) -> Build:
    return Build(
        factory="keymix.compare.costs:model_of",
        kwargs={"recipe": plan.recipe_for(mixer, 0).to_dict(), "data": to_json(data)},
        imports=plan.imports,
        task=data.task,
    )


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
    batch = 2 ** int(max(0.0, min(math.log2(BATCH_SIZE), math.log2(BATCH_SECONDS / seconds))))
    rounds = int(BUDGET_SECONDS / (max(1, len(models)) * (batch / 2 + 1) * seconds))
    return Effort(batch_size=batch, repeats=max(FEWEST, min(REPEATS, rounds)))


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
NOTHING = RunSpikes(time_steps=None, **dict.fromkeys(QUANTITIES))
_PJ = 1e-6  # µJ

SpikeRows = Mapping[str, RunSpikes]
"""What a run's spikes cost, or in its notes why that is not known, by the run's folder."""


def _measure_spikes(
    plan: Plan, images: ImageData, readings: Sequence[Reading], kept: Kept, *, say: Say
) -> None:
    """Read what the spikes of every finished run cost, unless that is kept of these weights."""
    runs = known_spikes(plan, readings) or {}
    left = [name for name, row in runs.items() if row.weights is None]
    if not left:
        return
    say(f"counting spikes of {len(left)} {'run' if len(left) == 1 else 'runs'}")
    spikes = dict(kept.spikes)
    for name in left:
        try:
            row = _study(plan.out / name, images)
        except FAILURES as error:  # a mixer of the user's may do what none does
            row = _unknown(reason(error))
        spikes[name] = replace(row, weights=weights_hash(plan.out / name))
    write_json(plan.out / COSTS, replace(kept, spikes=spikes))


def known_spikes(plan: Plan, readings: Sequence[Reading]) -> SpikeRows | None:
    """Return what the spikes of every finished run cost as far as it is known; None without any."""
    if not plan.spiking:
        return None
    found = _read(plan)
    kept = found.spikes if found else {}
    ann_labels = {each.label for each in plan.mixers if each.ann_of or each.reference}
    done = (reading.run for reading in readings if isinstance(reading, Finished))
    runs = {}
    for name in (run.folder for run in done if run.mixer not in ann_labels):
        row = kept.get(name)
        fresh = row is not None and row.weights == weights_hash(plan.out / name)
        runs[name] = row if row is not None and fresh else _unknown(NOT_YET)
    return runs


def _unknown(why: str) -> RunSpikes:
    return replace(NOTHING, notes=(why,))


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
        mine = [runs[name] for name, owner in finished.items() if owner == label and name in runs]
        found = [ann_rows[label]] if label in ann_rows else mine
        mixers[label] = MixerSpikes(
            **{key: statistics.summarize(_each(found, key)) for key in QUANTITIES},
            time_steps=next((row.time_steps for row in found if row.time_steps), None),
            notes=tuple(dict.fromkeys(note for row in mine for note in row.notes or ())),
        )
    read = (row.images for row in runs.values() if row.images)
    ann = {name: ann_rows[label] for name, label in finished.items() if label in ann_rows}
    return Spikes(
        images=next(read, IMAGES),
        mac_pj=cost.mac,
        ac_pj=cost.ac,
        mixers=mixers,
        runs={**runs, **ann},
    )


def _each(rows: Sequence[RunSpikes], key: str) -> list[float]:
    values = (getattr(row, key) for row in rows)
    return [value for value in values if value is not None]


def _ann_row(macs: Number | None, pj: float) -> RunSpikes:
    """Return the row of a network without spikes: multiply-adds alone."""
    energy = None if macs is None else macs * pj * _PJ
    return replace(
        NOTHING,
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
