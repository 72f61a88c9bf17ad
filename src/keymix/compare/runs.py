# SPDX-License-Identifier: Apache-2.0
"""Read the run folders of a comparison: which are done, what they scored, why others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from keymix.compare import mask_answers
from keymix.compare.answers import Answers, counts, packed, read_answers
from keymix.compare.environments import Lines, lines
from keymix.compare.mask_answers import MaskAnswers, read_mask_answers
from keymix.compare.outcome import MaskScores, Scores
from keymix.compare.plan import Entrant, Plan
from keymix.data.tasks import SEGMENTATION, TaskKind, task_of
from keymix.errors import UserError

T = TypeVar("T")

NOT_STARTED = "it has not started"
_OF_EACH_CLASS = ("jaccard", "dice", "hausdorff_mm", "missed")
_HERE = ("name", "data.spec", "data.workers")  # parts of a recipe that change no result


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One run as it was found.

    Args:
        run: Plain values for the record: ``mixer, seed, folder, status, reason``, and of a run
            that is done its scores and history, and ``notes`` of what its record lacks.
        answers: What it answered; ``None`` unless it is done.
        environment: What it was trained with, as lines; empty unless it is done.
        data: Its record of the data; empty unless it is done.
    """

    run: dict[str, Any]
    answers: Answers | MaskAnswers | None
    environment: Lines
    data: dict[str, Any]

    def scores(self, which: Literal["last", "best"]) -> Scores | MaskScores:
        """Return what a run that is done scored at one epoch."""
        if self.answers is None:
            raise ValueError(f"run {self.run['folder']} is {self.run['status']}: it has no scores")
        told = self.run[which]
        if isinstance(self.answers, MaskAnswers):
            return MaskScores(
                val_jaccard=told["val"]["jaccard"],
                **{key: told["test"][key] for key in (*SEGMENTATION.scores[1:], "hausdorff_mm")},
                cases=self.answers.cases(which),
                scored=self.answers.scored,
            )
        return Scores(
            val_top1=told["val"]["top1"],
            top1=told["test"]["top1"],
            top5=told["test"]["top5"],
            correct=self.answers.correct(which),
        )


def is_done(plan: Plan, entrant: Entrant, seed: int) -> bool:
    """Whether a run is finished, so that it is not trained again; nor are damaged files written.

    One that is damaged and cannot be mended counts as done: reading it tells why it failed.
    """
    from keymix.train.folder import is_finished

    try:
        return is_finished(plan.folder(entrant, seed))
    except UserError:
        return True


def read_run(
    plan: Plan, entrant: Entrant, seed: int, *, images: Mapping[str, Any], failure: str | None
) -> Reading:
    """Read one run; epochs are counted from 1.

    A run whose files cannot be read, or that is another run than the plan's, is told as failed.

    Args:
        plan: The comparison.
        entrant: Whose run.
        seed: Which run.
        images: Fingerprint and index hashes of the images, as `folder.identity` keeps them.
        failure: Why it failed when it was last tried, if it did.
    """
    run: dict[str, Any] = {
        "mixer": entrant.label,
        "seed": seed,
        "folder": plan.folder(entrant, seed).relative_to(plan.out).as_posix(),
    }
    from keymix.train.files import SUMMARY

    try:
        if (plan.folder(entrant, seed) / SUMMARY).exists():
            return _read_done(plan, entrant, seed, run, images)
    except UserError as error:
        run |= {"status": "failed", "reason": failure or str(error)}
    else:
        reason = failure or _how_far(plan, entrant, seed)
        run |= {"status": "failed" if failure else "missing", "reason": reason}
    return Reading(run=run, answers=None, environment={}, data={})


def _read_done(
    plan: Plan, entrant: Entrant, seed: int, run: dict[str, Any], images: Mapping[str, Any]
) -> Reading:
    from keymix.train.damage import check_metrics, read_environment, read_summary
    from keymix.train.files import METRICS, PREDICTIONS, read_metrics

    folder = plan.folder(entrant, seed)
    _check_recipe(plan, entrant, seed)
    summary = _read(folder, lambda: read_summary(folder))
    data = summary["data"]
    task = task_of(data)
    marks = {which: _mark(summary[which], task) for which in ("last", "best")}
    told = _told_of_masks(summary) if task is SEGMENTATION else {}
    changed = [key for key in images if data[key] != images[key]]
    if changed:
        raise UserError(
            f"it was trained on other images ({' and '.join(changed)} differ). Move its folder "
            "away to train it anew."
        )
    answers: Answers | MaskAnswers
    if task is SEGMENTATION:
        answers = _read(folder, lambda: read_mask_answers(folder / PREDICTIONS, data))
        told["overlaps"] = mask_answers.packed(answers.images("last"))
    else:
        answers = _read(folder, lambda: read_answers(folder / PREDICTIONS, data))
        correct = answers.correct("last")
        told["correct"] = packed(correct)
        told["class_correct"] = counts(answers.target[correct], len(data["classes"]))
    history = [
        {
            "epoch": line["epoch"] + 1,
            **{
                key: _finite(line.get(key))
                for key in ("train_loss", "val_loss", f"val_{task.score}")
            },
        }
        for line in read_metrics(folder / METRICS)
    ]
    notes, environment = list(summary.get("lost", [])), {}
    try:
        environment = read_environment(folder)
        if not notes:
            check_metrics(folder, plan.recipe.schedule.epochs)
    except UserError as error:
        again = "The same `keymix compare` command writes again what can be had of it"
        notes.append(f"{str(error).rstrip('.')}. {again}")
    done = {"status": "done", "reason": None, "seconds": summary["seconds"], **marks, **told}
    done |= {"notes": notes} if notes else {}
    return Reading(
        run=run | done | {"history": history},
        answers=answers,
        environment=lines(environment),
        data=data,
    )


def _read(folder: Path, read: Callable[[], T]) -> T:
    """Read a file of a finished run; say how it is mended if it is damaged."""
    try:
        return read()
    except UserError as error:
        raise UserError(_with_remedy(error, folder)) from None


def _with_remedy(error: UserError, folder: Path) -> str:
    from keymix.train.folder import can_be_tested

    remedy = "Restore it, or move the run's folder away to train it again"
    if can_be_tested(folder):
        remedy = (
            "Run the same `keymix compare` command again, which writes it from the run's "
            "checkpoint or weights"
        )
    return f"{str(error).rstrip('.')}. {remedy}"


def _check_recipe(plan: Plan, entrant: Entrant, seed: int) -> None:
    """Refuse a folder that somebody filled with another run.

    Where the images lie may differ on another machine: their fingerprint is checked instead.
    """
    from keymix.compare.folder import differences
    from keymix.train.damage import recorded_recipe

    there = recorded_recipe(plan.folder(entrant, seed)).to_dict()
    differing = [
        found
        for found in differences(there, plan.recipe_for(entrant, seed).to_dict())
        if found[0] not in _HERE
    ]
    if differing:
        key, found, wanted = differing[0]
        raise UserError(
            f"its folder holds another run: {key} is {found!r} there and {wanted!r} here. Move it "
            "away to train this one."
        )


def _how_far(plan: Plan, entrant: Entrant, seed: int) -> str:
    from keymix.train.files import METRICS, read_metrics

    path = plan.folder(entrant, seed) / METRICS
    done = len(read_metrics(path)) if path.exists() else 0
    if not done:
        return NOT_STARTED
    return f"it is not finished: {done} of {plan.recipe.schedule.epochs} epochs are done"


def _mark(told: Mapping[str, Any], task: TaskKind) -> dict[str, Any]:
    keys = (*task.scores[1:], task.scores[0])
    of_test = (*keys, "hausdorff_mm", "hausdorff_missed") if task is SEGMENTATION else keys
    return {
        "epoch": None if told["epoch"] is None else told["epoch"] + 1,
        **{
            split: {metric: _finite(told[split].get(metric)) for metric in metrics}
            for split, metrics in (("val", keys), ("test", of_test))
        },
    }


def _told_of_masks(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a summary tells of each class, last epoch, and the unit of its distances."""
    test = summary["last"]["test"]
    return {
        "classes": [{key: row[key] for key in _OF_EACH_CLASS} for row in test["classes"]],
        "hausdorff_unit": test["hausdorff_unit"],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
