# SPDX-License-Identifier: Apache-2.0
"""From the runs as they were read to the record that tables and report are rendered from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keymix.compare import data_check, environments, spike_costs, words
from keymix.compare.answers import Answers, confusions, counts
from keymix.compare.mask_answers import MaskAnswers
from keymix.compare.outcome import caution, lead, outcome
from keymix.compare.plan import Plan
from keymix.compare.runs import Reading, read_run
from keymix.data.tasks import SEGMENTATION, scored_classes, task_of
from keymix.report.html import FORMAT

if TYPE_CHECKING:
    from torch import nn


def read_runs(
    plan: Plan, *, images: Mapping[str, Any], failures: Mapping[tuple[str, int], str]
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

    done = {(r.run["mixer"], r.run["seed"]): r.run["folder"] for r in runs if r.answers is not None}
    seed = next((s for s in plan.seeds if any((m, s) in done for m in plan.labels)), plan.seeds[0])
    models = {
        label: load_run(plan.out / done[label, seed]).model("last")
        for label in plan.labels
        if (label, seed) in done
    }
    return seed, models


def make_record(
    plan: Plan,
    data: Mapping[str, Any],
    readings: Sequence[Reading],
    *,
    command: str,
    costs: Mapping[str, Any],
    measured: Mapping[str, Any],
    attention: Mapping[str, Any] | None,
    collapse: Mapping[str, Any] | None,
    spikes: Mapping[str, Any] | None,
    checked: Mapping[str, Any] | None,
    processes: int,
    threads: int,
    gallery: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the content of ``results.json``: all that the report shows, plain values."""
    from keymix.train.environment import environment

    task = task_of(data)
    done = [r for r in readings if r.answers is not None]
    rows = {
        which: outcome(
            plan.labels,
            baseline=plan.baseline,
            seeds=plan.seeds,
            scores=_scores(plan, done, which),
            task=task,
            classes=data["classes"],
            narrow=bool(data_check.narrow(checked, data)),
        )
        for which in ("last", "best")
    }
    here = environments.lines(environment())
    trained_with, places = environments.distinct([r.environment for r in done])
    runs = [dict(r.run) for r in readings]
    told_spikes = spike_costs.table(plan, readings, spikes, costs)
    finished = [run for run in runs if run["status"] == "done"]
    for run, place in zip(finished, places, strict=True):
        run["trained_with"] = place
    told_of_masks = _of_masks(data, done, gallery) if task is SEGMENTATION else {}
    return {
        "format": FORMAT,
        **({"task": task.name} if task is SEGMENTATION else {}),
        "title": words.title(data),
        "facts": words.of_data(words.facts(plan, data), data),
        "lead": words.of_data(lead(rows["last"], baseline=plan.baseline, task=task), data),
        "caution": words.of_data(caution(len(plan.seeds), task=task), data),
        "created": time.strftime("%Y-%m-%d %H:%M %Z"),
        "command": command,
        "environment": {key: line for key, line in here.items() if key != "threads"},
        "trained_with": trained_with,
        "environment_warning": environments.warning(trained_with, here),
        "data": dict(data),
        "data_line": words.data_line(data),
        "data_check": data_check.sheet(checked, data),
        "left_out": list(data.get("left_out", [])),
        "recipe": plan.recipe.to_dict(),
        "match": plan.match,
        "readout": {"pooling": plan.pooling, "because": list(plan.unheard)},
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "processes": processes,
        "threads": threads,
        "mixers": [
            {"label": e.label, "slug": e.slug, "control": e.control, "note": e.note}
            for e in plan.entrants
        ],
        "outcome": words.of_data(rows, data),
        **(told_of_masks or _class_by_class(plan, data, done)),
        "costs": dict(costs),
        "measured": dict(measured),
        **({} if told_spikes is None else {"spikes": words.of_data(told_spikes, data)}),
        "method": words.of_data(
            words.method(
                plan,
                data,
                processes=processes,
                threads=threads,
                done=len(done),
                device=str(measured["device"]),
                narrow=data_check.narrow(checked, data),
            ),
            data,
        ),
        "curves_note": words.of_data(words.curves_note(plan), data),
        "runs": runs,
        "attention": attention,
        "collapse": collapse,
    }


def _scores(plan: Plan, done: Sequence[Reading], which: Any) -> dict[str, dict[int, Any]]:
    table: dict[str, dict[int, Any]] = {label: {} for label in plan.labels}
    for reading in done:
        table[reading.run["mixer"]][reading.run["seed"]] = reading.scores(which)
    return table


def _class_by_class(plan: Plan, data: Mapping[str, Any], done: Sequence[Reading]) -> dict[str, Any]:
    """Tell how many test images each class has, and what was taken for what."""
    names = list(data["classes"])
    answers = [(r.run["mixer"], r.answers) for r in done if isinstance(r.answers, Answers)]
    return {
        "test_images": int(data["sizes"]["test"]),
        "classes": {
            "names": names,
            "test_images": counts(answers[0][1].target, len(names)) if answers else None,
        },
        "confusions": {
            label: confusions(found for mixer, found in answers if mixer == label)
            for label in plan.labels
            if any(mixer == label for mixer, _ in answers)
        },
    }


def _of_masks(
    data: Mapping[str, Any], done: Sequence[Reading], gallery: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Tell how many test images and cases each class is in, and the pictures of some masks."""
    answers = next((r.answers for r in done if isinstance(r.answers, MaskAnswers)), None)
    unit = next((str(r.run["hausdorff_unit"]) for r in done), "mm")
    names = [data["classes"][c] for c in scored_classes(data)]
    return {
        "test_images": int(data["sizes"]["test"]),
        "test_cases": None if answers is None else len(np.unique(answers.group)),
        "classes": {
            "names": names,
            "test_images": None if answers is None else (answers.truth > 0).sum(axis=0).tolist(),
        },
        "hausdorff_unit": unit,
        "gallery": None if gallery is None else dict(gallery),
    }
