# SPDX-License-Identifier: Apache-2.0
"""What each mixer costs: counted, and measured alone after training, all in turns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from keymix.compare.executor import FAILURES
from keymix.compare.plan import Entrant, Plan
from keymix.compare.worker import reason
from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.records import from_json, to_json
from keymix.report.record import CostRow

if TYPE_CHECKING:
    from torch import nn

    from keymix.analysis.memory import Build

BATCH_SIZE, REPEATS, FEWEST = 64, 20, 7
BATCH_SECONDS = 4.0
"""A batch is made smaller until it takes less than about so long."""
BUDGET_SECONDS = 30.0
"""Timing of all mixers together takes less than about so long, at seven rounds at least."""
PEAK_SECONDS = 1.5
"""About what the fresh process takes that measures a model's peak memory."""


def model_of(recipe: Mapping[str, Any], data: object) -> nn.Module:
    """Build the model of a recipe for data, both as plain values; another process does so, too."""
    from keymix.train.model import model_for
    from keymix.train.recipe import from_dict

    return model_for(from_dict(recipe), from_json(DataRecord, data, where="the record of the data"))


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How large the batches are and how many rounds are taken, the same for all mixers.

    Args:
        batch_size: Images a batch.
        repeats: Rounds.
    """

    batch_size: int
    repeats: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1")


def costs(
    plan: Plan, data: DataRecord, *, threads: int, effort: Effort | None = None
) -> tuple[dict[str, CostRow], Effort]:
    """Count and measure the models of the mixers of a plan.

    Latencies are taken in turns in one process, so that a machine that drifts is unfair to none.

    Args:
        plan: The mixers.
        data: The record of the images, for their shape and classes.
        threads: CPU threads of the measurement.
        effort: Batch size and rounds of mixers that were measured before; chosen if ``None``.

    Returns:
        Costs by label, and the batch size and rounds.
    """
    from keymix.analysis.measure import measure_interleaved, with_peak
    from keymix.analysis.memory import peak_memory
    from keymix.train.model import device_of_this_machine

    shape = _shape(data)
    builds = _builds(plan, data)
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
    table: dict[str, CostRow] = {}
    for entrant in plan.entrants:
        label = entrant.label
        if label in broken:
            note = f"its model does not run: {broken[label]}"
            table[label] = CostRow.unknown(entrant.params, note=note)
            continue
        row, cost = _counted(entrant, models[label], data), measured[label]
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
            note="; ".join(notes),
        )
    return table, effort


def counted(plan: Plan, data: DataRecord) -> dict[str, CostRow]:
    """Count the models of the mixers of a plan and measure nothing.

    Args:
        plan: The mixers.
        data: The record of the images, for their shape and classes.
    """
    table: dict[str, CostRow] = {}
    builds = _builds(plan, data)
    for entrant in plan.entrants:
        try:
            table[entrant.label] = _counted(entrant, builds[entrant.label].make(), data)
        except FAILURES as error:  # a mixer of the user's may be gone
            note = f"not counted: {reason(error)}"
            table[entrant.label] = CostRow.unknown(entrant.params, note=note)
    return table


def _counted(entrant: Entrant, model: nn.Module, data: DataRecord) -> CostRow:
    from keymix.analysis.counting import count

    row = CostRow.unknown(entrant.params, note="")
    try:
        found = count(model, _shape(data), task=data.task)
    except FAILURES as error:  # a mixer of the user's may fail in training mode alone
        return replace(row, note=f"not counted: {reason(error)}")
    return replace(
        row,
        macs=found.macs,
        activation_bytes=found.activation_bytes,
        time_steps=found.time_steps,
    )


def _shape(data: DataRecord) -> tuple[int, ...]:
    """Return the shape of one input, by the axes of its kind."""
    sizes = dict(zip("TCHW", (data.time_steps, data.in_chans, *data.image_size), strict=True))
    return tuple(int(sizes[axis] or 0) for axis in re.findall("[TCHW]", data.kind.axes))


def _builds(plan: Plan, data: DataRecord) -> dict[str, Build]:
    from keymix.analysis.memory import Build

    return {
        entrant.label: Build(
            factory="keymix.compare.costs:model_of",
            kwargs={
                "recipe": plan.recipe_for(entrant, 0).to_dict(),
                "data": to_json(data),
            },
            imports=plan.imports,
            task=data.task,
        )
        for entrant in plan.entrants
    }


def expected_seconds(image_seconds: Sequence[float]) -> float:
    """Return about how long `costs` will take.

    Args:
        image_seconds: Seconds of one image in evaluation, one number a model.
    """
    if not image_seconds:
        return 0.0
    models, slowest = len(image_seconds), max(image_seconds)
    effort = effort_for(max(slowest, 1e-5), models)
    rounds = (effort.repeats + 3) * (effort.batch_size + 1) * sum(image_seconds)
    return rounds + PEAK_SECONDS * models


def _breaks(model: nn.Module, data: DataRecord) -> str | None:
    """Say why a model cannot run on one image; ``None`` if it can."""
    import torch

    from keymix.analysis.passes import example_for, passes_of

    model.eval()
    try:
        with torch.inference_mode():
            model(example_for(model, passes_of(data.task), _shape(data), 1))
    except FAILURES as error:
        return reason(error)
    return None


def _effort(models: Sequence[nn.Module], data: DataRecord, threads: int) -> Effort:
    """Choose batch size and rounds, so that large models are measured in sensible time too."""
    from keymix.analysis.measure import measure_interleaved

    seconds = 1e-5
    if models:  # the fastest of a few passes: a busy machine slows any of them
        trial = measure_interleaved(
            {str(i): model for i, model in enumerate(models)},
            _shape(data),
            batch_size=1,
            repeats=3,
            warmup=1,
            threads=threads,
            task=data.task,
        )
        seconds = max(cost.latency_q1_ms for cost in trial.values()) / 1e3
    return effort_for(seconds, len(models))


def effort_for(seconds: float, models: int) -> Effort:
    """Return the effort for models whose slowest takes so many seconds an image."""
    batch = 2 ** int(max(0.0, min(math.log2(BATCH_SIZE), math.log2(BATCH_SECONDS / seconds))))
    rounds = int(BUDGET_SECONDS / (max(1, models) * (batch / 2 + 1) * seconds))
    return Effort(batch_size=batch, repeats=max(FEWEST, min(REPEATS, rounds)))
