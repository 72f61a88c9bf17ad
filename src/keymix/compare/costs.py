# SPDX-License-Identifier: Apache-2.0
"""What each mixer costs: counted, and measured after training, all mixers in turns.

``costs.json`` is a cache of one table, with the machine, versions, model and input that it holds
for. In another setting, or with a mixer more, all are measured again, so that no table mixes two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from keymix.analysis.counting import count
from keymix.analysis.measure import measure_interleaved, training_quartiles_ms, with_peak
from keymix.analysis.memory import Build, peak_memory
from keymix.compare.models import input_shape
from keymix.compare.question import Plan, PlannedMixer
from keymix.compare.runs import Finished, Reading
from keymix.data.record import DataRecord
from keymix.errors import FAILURES, UserError, reason
from keymix.records import from_json, to_json
from keymix.report.record import CostRow, Lines, Measured
from keymix.train.environment import environment, lines
from keymix.train.files import read_json, write_json
from keymix.train.model import device_of_this_machine, model_for
from keymix.train.recipe import from_dict

COSTS = "costs.json"
BATCH_SIZE, REPEATS, FEWEST = 64, 20, 7
"""Images of a batch and rounds at most, and the fewest rounds."""
BATCH_SECONDS = 4.0
"""A batch is made smaller until it takes less than about so long."""
BUDGET_SECONDS = 30.0
"""Timing of all mixers together takes less than about so long, at seven rounds at least."""
NOT_YET = Measured(device="cpu", batch_size=BATCH_SIZE, repeats=0, threads=0)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The content of ``costs.json``: how costs were measured, and those of each mixer by label."""

    measured: Measured
    rows: Mapping[str, CostRow]


def measure_costs(
    plan: Plan, data: DataRecord, readings: Sequence[Reading], *, say: Callable[[str], None]
) -> None:
    """Measure all mixers that have trained, unless the folder has their costs in this setting.

    One whose runs failed has none: its model may end this process, too.
    """
    kept, setting, trained = _kept(plan), _setting(plan, data), _trained(plan, readings)
    if kept.measured.setting != setting or any(each.label not in kept.rows for each in trained):
        say("measuring costs")
        write_json(plan.out / COSTS, measure(plan, trained, data, setting))


def known_costs(plan: Plan, data: DataRecord, readings: Sequence[Reading]) -> Costs:
    """Return every mixer's costs as the folder has them, else counted; measure nothing."""
    kept = _kept(plan)
    rows = {each.label: CostRow(params=each.params) for each in plan.mixers}
    for mixer in _trained(plan, readings):
        rows[mixer.label] = kept.rows.get(mixer.label) or _counted(plan, mixer, data)[0]
    return replace(kept, rows=rows)


def _trained(plan: Plan, readings: Sequence[Reading]) -> list[PlannedMixer]:
    done = {each.run.mixer for each in readings if isinstance(each, Finished)}
    return [each for each in plan.mixers if each.label in done]


def _kept(plan: Plan) -> Costs:
    """Return what the folder has; a file that is missing or damaged has nothing."""
    path = plan.out / COSTS
    with suppress(UserError):
        return from_json(Costs, read_json(path), where=repr(str(path)))
    return Costs(measured=NOT_YET, rows={})


def _setting(plan: Plan, data: DataRecord) -> Lines:
    """Return what costs depend on; a GPU's work is started by the threads that a run has."""
    threads = plan.threads if device_of_this_machine().type == "cuda" else 1
    return {
        **lines(environment()),
        "threads": str(threads),
        "model": plan.recipe.model.name,
        "input": "×".join(map(str, input_shape(data))),
    }


def measure(plan: Plan, mixers: Sequence[PlannedMixer], data: DataRecord, setting: Lines) -> Costs:
    """Count and measure the models of mixers.

    They are timed in turns in one process, so that a machine that drifts is unfair to none.
    """
    shape, threads, device = input_shape(data), int(setting["threads"]), device_of_this_machine()
    counted = {each.label: _counted(plan, each, data) for each in mixers}
    rows = {label: row for label, (row, _) in counted.items()}
    models = {label: each.to(device) for label, (_, each) in counted.items() if each is not None}
    if not models:
        return Costs(measured=replace(NOT_YET, setting=setting), rows=rows)
    batch_size, repeats = _effort(models, plan, data, threads)
    steps = training_quartiles_ms(
        models,
        shape,
        batch_size=batch_size,
        seconds=BUDGET_SECONDS / 2,
        threads=threads,
        task=data.task,
    )
    costs = measure_interleaved(
        models,
        shape,
        batch_size=batch_size,
        repeats=repeats,
        threads=threads,
        task=data.task,
    )
    if device.type == "cpu":
        builds = {each.label: _build(plan, each, data) for each in mixers if each.label in models}
        peaks = peak_memory(
            builds, shape, batch_size=batch_size, threads=threads, phases=("training",)
        )
        costs = {label: with_peak(cost, peaks[label]) for label, cost in costs.items()}
    for label, cost in costs.items():
        low, step, high = steps[label]
        rows[label] = replace(
            rows[label],
            latency_ms=cost.latency_ms,
            latency_low_ms=cost.latency_q1_ms,
            latency_high_ms=cost.latency_q3_ms,
            images_per_s=cost.images_per_s,
            peak_mib=cost.peak_mib,
            step_low_ms=low,
            step_ms=step,
            step_high_ms=high,
            busy=cost.busy,
            note=cost.peak_note if cost.peak_mib is None else "",
        )
    measured = Measured(
        device=device.type,
        batch_size=batch_size,
        repeats=repeats,
        threads=threads,
        setting=setting,
        when=time.strftime("%Y-%m-%d %H:%M %Z"),
    )
    return Costs(measured=measured, rows=rows)


def _counted(plan: Plan, mixer: PlannedMixer, data: DataRecord) -> tuple[CostRow, nn.Module | None]:
    """Build a mixer's model and count what it costs; without a model where that fails."""
    row = CostRow(params=mixer.params)
    try:
        model = model_for(plan.recipe_for(mixer, 0), data)
        found = count(model, input_shape(data), task=data.task)
    except FAILURES as error:  # a mixer of the user's may be gone, or do what nobody counts
        return replace(row, note=reason(error)), None
    return replace(
        row,
        macs=found.macs,
        activation_bytes=found.activation_bytes,
        time_steps=found.time_steps,
        uncounted=tuple(found.uncounted),
    ), model


def _effort(
    models: Mapping[str, nn.Module], plan: Plan, data: DataRecord, threads: int
) -> tuple[int, int]:
    """Choose batch size and rounds, so that large models are measured in sensible time too."""
    trial = measure_interleaved(
        models,
        input_shape(data),
        batch_size=1,
        repeats=3,
        warmup=1,
        threads=threads,
        task=data.task,
    )  # the fastest of a few passes: a busy machine slows any of them
    slowest = max(cost.latency_q1_ms for cost in trial.values()) / 1e3
    fitting = 2 ** int(max(1.0, math.log2(BATCH_SECONDS / slowest)))
    batch = min(plan.recipe.data.batch_size, BATCH_SIZE, fitting)
    rounds = int(BUDGET_SECONDS / (len(models) * (batch / 2 + 1) * slowest))
    return batch, max(FEWEST, min(REPEATS, rounds))


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
