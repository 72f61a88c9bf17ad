# SPDX-License-Identifier: Apache-2.0
"""From the runs as they were read to the record that tables and report are rendered from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from keymix.compare import data_check, environments, spike_costs, words
from keymix.compare.outcome import Scores, caution, lead, outcome
from keymix.compare.plan import Plan
from keymix.compare.runs import Finished, Reading, read_run
from keymix.data.record import DataRecord, SameImages
from keymix.records import Own
from keymix.report.part import page_of
from keymix.report.record import (
    Attention,
    Checked,
    Collapse,
    ComparedMixer,
    ComparisonRecord,
    CostRow,
    Measured,
    Outcome,
    OutcomeRow,
    Readout,
    Which,
)
from keymix.report.wording import unit_of
from keymix.task import DEFAULT

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """What was read off the models and the images; None where it could not be.

    Args:
        attention: Attention maps.
        collapse: How alike neighbouring blocks are.
        own: The task's pictures of the models' answers.
    """

    attention: Attention | None = None
    collapse: Collapse | None = None
    own: Own = field(default_factory=Own)


def read_runs(
    plan: Plan, *, images: SameImages, failures: Mapping[tuple[str, int], str]
) -> list[Reading]:
    """Read every run of the plan, mixer by mixer."""
    return [
        read_run(
            plan, entrant, seed, images=images, failure=failures.get((entrant.label, seed), None)
        )
        for entrant in plan.entrants
        for seed in plan.seeds
    ]


def trained_models(plan: Plan, runs: Sequence[Reading]) -> tuple[int, dict[str, nn.Module]]:
    """Load every mixer's model of the first seed at which any run is done, last epoch.

    Returns:
        The seed, and the models by label; a mixer without that run is absent.
    """
    from keymix.train.runs import load_run

    done = {(r.run.mixer, r.run.seed): r.run.folder for r in runs if isinstance(r, Finished)}
    seed = next((s for s in plan.seeds if any((m, s) in done for m in plan.labels)), plan.seeds[0])
    models = {
        label: load_run(plan.out / done[label, seed]).model("last")
        for label in plan.labels
        if (label, seed) in done
    }
    return seed, models


def make_record(
    plan: Plan,
    data: DataRecord,
    readings: Sequence[Reading],
    *,
    command: str,
    costs: Mapping[str, CostRow],
    measured: Measured,
    pictures: Pictures,
    spikes: Mapping[str, spike_costs.Row] | None,
    checked: Checked | None,
    processes: int,
    threads: int,
) -> ComparisonRecord:
    """Make the content of ``results.json``: all that the report shows."""
    from keymix.train.environment import environment

    task = data.task_kind
    done = [reading for reading in readings if isinstance(reading, Finished)]
    narrow = data_check.narrow(checked, data)

    def rows(which: Which) -> tuple[OutcomeRow, ...]:
        return outcome(
            plan.labels,
            baseline=plan.baseline,
            seeds=plan.seeds,
            scores=_scores(plan, done, which),
            task=task,
            unit=unit_of(data),
            narrow=bool(narrow),
        )

    outcomes = Outcome(last=rows("last"), best=rows("best"))
    here = environments.lines(environment())
    trained_with, places = environments.distinct([reading.environment for reading in done])
    place = dict(zip(((r.run.mixer, r.run.seed) for r in done), places, strict=True))
    table = spike_costs.table(plan, readings, spikes, costs, inputs=data.kind.nouns)
    method = words.method(
        plan,
        data,
        processes=processes,
        threads=threads,
        done=len(done),
        device=measured.device,
        narrow=narrow,
    )
    own = Own.of(page_of(task).keep_comparison([reading.tested for reading in done], data))
    return ComparisonRecord(
        task=None if task.name == DEFAULT else task.name,
        title=words.title(data),
        facts=words.facts(plan, data),
        lead=lead(outcomes.last, baseline=plan.baseline, task=task, inputs=data.kind.nouns),
        caution=caution(len(plan.seeds), task=task),
        created=time.strftime("%Y-%m-%d %H:%M %Z"),
        command=command,
        environment={key: line for key, line in here.items() if key != "threads"},
        trained_with=trained_with,
        environment_warning=environments.warning(trained_with, here),
        data=data,
        data_line=words.data_line(data),
        data_check=None if checked is None else data_check.sheet(checked, data),
        left_out=data.left_out,
        recipe=plan.recipe,
        match=plan.match,
        readout=Readout(pooling=plan.pooling, because=plan.unheard),
        baseline=plan.baseline,
        seeds=plan.seeds,
        processes=processes,
        threads=threads,
        mixers=tuple(
            ComparedMixer(label=e.label, slug=e.slug, control=e.control, note=e.note)
            for e in plan.entrants
        ),
        outcome=outcomes,
        test_images=data.sizes["test"],
        costs=costs,
        measured=measured,
        spikes=table,
        method=method,
        curves_note=words.curves_note(plan, data),
        runs=tuple(
            replace(r.run, trained_with=place[r.run.mixer, r.run.seed])
            if isinstance(r, Finished)
            else r
            for r in readings
        ),
        attention=pictures.attention,
        collapse=pictures.collapse,
        own=Own({**own.values, **pictures.own.values}),
    )


def _scores(plan: Plan, done: Sequence[Finished], which: Which) -> dict[str, dict[int, Scores]]:
    table: dict[str, dict[int, Scores]] = {label: {} for label in plan.labels}
    for reading in done:
        table[reading.run.mixer][reading.run.seed] = reading.scores(which)
    return table
