# SPDX-License-Identifier: Apache-2.0
"""Read the run folders of a comparison: which are done, what they scored, why others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from keymix.analysis.answers import Answers
from keymix.compare.environments import lines
from keymix.compare.outcome import Scores
from keymix.compare.plan import Entrant, Plan
from keymix.data.record import DataRecord, SameImages
from keymix.errors import UserError
from keymix.records import Own
from keymix.report.part import Page, RunAnswers, page_of
from keymix.report.record import DoneRun, HistoryLine, Lines, Mark, Number, OpenRun, Which
from keymix.task import LOSS, Task
from keymix.train.record import Environment, Tested

T = TypeVar("T")

NOT_STARTED = "it has not started"
_HERE = ("name", "data.spec", "data.workers")  # parts of a recipe that change no result


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished run as it was read.

    Args:
        run: Its part of the record, but for the position of its environment.
        answers: What it answered on the test split, by epoch.
        details: What the task recorded next to the scores of the last epoch.
        environment: What it was trained with.
        data: Its record of the data.
    """

    run: DoneRun
    answers: Mapping[Which, Answers]
    details: Own
    environment: Lines
    data: DataRecord

    @property
    def tested(self) -> RunAnswers:
        """What the task reads of it."""
        return RunAnswers(mixer=self.run.mixer, answers=self.answers["last"], details=self.details)

    def scores(self, which: Which) -> Scores:
        """Return what it scored at one epoch."""
        mark, key = self.run.mark(which), self.data.task_kind.score.key
        return Scores(
            val=_needed(mark.val[key]),
            test={**mark.test, key: _needed(mark.test[key])},
            answers=self.answers[which],
        )


Reading = Finished | OpenRun
"""A run as it was found."""


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
    plan: Plan, entrant: Entrant, seed: int, *, images: SameImages, failure: str | None
) -> Reading:
    """Read one run; epochs are counted from 1.

    A run whose files cannot be read, or that is another run than the plan's, counts as failed.

    Args:
        plan: The comparison.
        entrant: Whose run.
        seed: Which run.
        images: Those of the comparison.
        failure: Why it failed when it was last tried, if it did.
    """
    from keymix.train.files import SUMMARY

    folder = plan.folder(entrant, seed)
    status: Literal["failed", "missing"] = "failed"
    try:
        if (folder / SUMMARY).exists():
            return _read_done(plan, entrant, seed, images)
    except UserError as error:
        reason = failure or str(error)
    else:
        status = "failed" if failure else "missing"
        reason = failure or _how_far(plan, entrant, seed)
    return OpenRun(
        mixer=entrant.label,
        seed=seed,
        folder=folder.relative_to(plan.out).as_posix(),
        status=status,
        reason=reason,
    )


def _read_done(plan: Plan, entrant: Entrant, seed: int, images: SameImages) -> Finished:
    from keymix.train.files import METRICS, PREDICTIONS, read_metrics
    from keymix.train.folder import (
        check_metrics,
        read_answers,
        read_environment,
        read_summary,
    )

    folder = plan.folder(entrant, seed)
    _check_recipe(plan, entrant, seed)
    summary = _read(folder, lambda: read_summary(folder))
    data, task = summary.data, summary.data.task_kind
    changed = SameImages.of(data).changed(images)
    if changed:
        raise UserError(
            f"it was trained on other images ({' and '.join(changed)} differ). Move its folder "
            "away to train it anew."
        )
    page = page_of(task)
    validated = (LOSS, task.score.key) if task.validation_loss else (task.score.key,)
    history = tuple(
        HistoryLine(
            epoch=line.epoch + 1,
            values={
                f"train_{LOSS}": _finite(line.train.get(LOSS)),
                **{f"val_{key}": _finite(line.val.get(key)) for key in validated},
            },
        )
        for line in read_metrics(folder / METRICS)
    )
    notes, environment = list(summary.lost), Environment()
    try:
        environment = read_environment(folder)
        if not notes:
            check_metrics(folder, plan.recipe.schedule.epochs)
    except UserError as error:
        again = "The same `keymix compare` command writes again what can be had of it"
        notes.append(f"{str(error).rstrip('.')}. {again}")
    run = DoneRun(
        mixer=entrant.label,
        seed=seed,
        folder=folder.relative_to(plan.out).as_posix(),
        status="done",
        reason=None,
        seconds=summary.seconds,
        last=_mark(summary.last, task, page),
        best=_mark(summary.best, task, page),
        notes=tuple(notes) or None,
        history=history,
        trained_with=0,
    )
    found = Finished(
        run=run,
        answers=_read(folder, lambda: read_answers(folder / PREDICTIONS, data)),
        details=summary.last.test.own,
        environment=lines(environment),
        data=data,
    )
    return replace(found, run=replace(run, own=Own.of(page.keep_run(found.tested, data))))


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
    from keymix.train.folder import recorded_recipe

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


def _mark(tested: Tested, task: Task, page: Page) -> Mark:
    keys = [*(score.key for score in task.scores), *([LOSS] if task.validation_loss else [])]
    test: dict[str, Number | None] = {key: _finite(tested.test.scores.get(key)) for key in keys}
    for key in (*(score.key for score in page.test_scores), *page.test_numbers):
        value = tested.test.own.values.get(key)
        test[key] = _finite(value) if isinstance(value, int | float) else None
    return Mark(
        epoch=None if tested.epoch is None else tested.epoch + 1,
        val={key: _finite(tested.val.get(key)) for key in keys},
        test=test,
    )


def _finite(value: Number | None) -> Number | None:
    return value if value is not None and np.isfinite(value) else None


def _needed(value: Number | None) -> Number:
    if value is None:
        raise ValueError("a finished run has no score")
    return value
