# SPDX-License-Identifier: Apache-2.0
"""Read the run folders of a comparison: which are done, what they scored, why others are not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from keymix.analysis.answers import Answers
from keymix.compare.question import Plan, PlannedMixer
from keymix.data.record import DataRecord, SameImages
from keymix.errors import UserError
from keymix.records import Own, differences
from keymix.report.part import Page, RunAnswers, page_of
from keymix.report.record import DoneRun, HistoryLine, Lines, Mark, Number, OpenRun, Which
from keymix.task import LOSS, Task
from keymix.train.environment import lines
from keymix.train.files import LOOK, METRICS, SUMMARY, Lock, read_metrics
from keymix.train.folder import is_finished, read_finished
from keymix.train.recipe import Recipe
from keymix.train.record import Tested

DAMAGED = ".damaged"
"""Ends the name of the folder that a damaged run is moved to before it is trained again."""
ERROR = "error.txt"
"""In a run's folder, why it failed when it was last tried: one line."""
NOT_STARTED = "it has not started"
NAMED = 3
"""Runs that are waited for and named."""
_HERE = ("name", "data.spec", "data.workers")  # parts of a recipe that change no result


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one finished run scored with its weights of one epoch (the last, or the best)."""

    val: float | None  # the score that models are compared by, on the validation split
    test: Mapping[str, float | None]  # by key, None where one is not defined
    answers: Answers  # on the test split


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished run as it was read."""

    run: DoneRun  # its part of the record, but for the position of its environment
    answers: Mapping[Which, Answers]  # on the test split
    details: Own  # what the task recorded next to the scores of the last epoch
    environment: Lines  # what it was trained with
    data: DataRecord

    @property
    def tested(self) -> RunAnswers:
        """What the task reads of it."""
        return RunAnswers(mixer=self.run.mixer, answers=self.answers["last"], details=self.details)

    def scores(self, which: Which) -> Scores:
        """Return what it scored at one epoch."""
        mark, key = self.run.mark(which), self.data.task_kind.score.key
        return Scores(
            val=mark.val[key],
            test={**mark.test, key: _needed(mark.test[key])},
            answers=self.answers[which],
        )


Reading = Finished | OpenRun
"""A run as it was found."""


class Left:
    """The runs that are left of those asked for, by their number in the plan; all if None.

    Other processes, on other machines too, may work on the same: one takes what nobody works on.
    """

    def __init__(self, plan: Plan, numbers: Sequence[int] | None = None) -> None:
        asked = range(len(plan.pairs)) if numbers is None else numbers
        self._folders = {number: plan.folder(*plan.pairs[number]) for number in asked}
        self.total = len(self._folders)
        open_ = [number for number, place in self._folders.items() if not is_finished(place)]
        self._locks = {number: Lock(self._folders[number]) for number in open_}
        self._failed = {number: _failed_at(self._folders[number]) for number in open_}
        self._next = 0.0  # look, by the clock

    def __len__(self) -> int:
        return len(self._locks)

    @property
    def numbers(self) -> list[int]:
        """Those that are left now."""
        return [*self._locks]

    def take(self) -> int | None:
        """Take the first that nobody works on, done elsewhere meanwhile or not; None if all are.

        A run is looked at once in `LOOK` seconds.
        """
        if time.monotonic() >= self._next:
            for number, lock in self._locks.items():
                if lock.free():
                    del self._locks[number]
                    return number
            self._next = time.monotonic() + LOOK
        return None

    def put_back(self, number: int) -> None:
        """Leave a run that another process took first."""
        self._locks[number] = Lock(self._folders[number])

    def failed(self, number: int) -> bool:
        """Whether a run has failed elsewhere meanwhile: it would here."""
        return _failed_at(self._folders[number]) not in (0, self._failed[number])


def _failed_at(folder: Path) -> int:
    """Return when a run's failure was recorded, 0 if none is."""
    try:
        return (folder / ERROR).stat().st_mtime_ns
    except OSError:
        return 0


State = Literal["done", "running", "failed", "left"]


def state_of(folder: Path) -> State:
    """Return how a run is: done, being trained by some process, failed when last tried, or left."""
    if not Lock(folder).free():
        return "running"
    if is_finished(folder):
        return "done"
    return "failed" if _failed_at(folder) else "left"


def log_of(folder: Path) -> Path:
    """Return the file next to a run's folder that has what its process said, and tracebacks."""
    return folder.with_name(f"{folder.name}.log")


def read_error(folder: Path) -> str:
    """Return why a run failed when it was last tried; empty if it did not."""
    try:
        return (folder / ERROR).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def read_runs(plan: Plan, *, images: SameImages) -> list[Reading]:
    """Read every run of the plan, mixer by mixer."""
    return [read_run(plan, mixer, seed, images) for mixer in plan.mixers for seed in plan.seeds]


def read_run(plan: Plan, mixer: PlannedMixer, seed: int, images: SameImages) -> Reading:
    """Read one run; epochs are counted from 1.

    A run whose files cannot be read, that is another run than the plan's or of other images,
    counts as failed.
    """
    folder = plan.folder(mixer, seed)
    failure = read_error(folder)
    status: Literal["failed", "missing"] = "failed"
    try:
        if (folder / SUMMARY).exists():
            return _read_done(plan, mixer, seed, images)
    except UserError as error:
        reason = failure or str(error)
    else:
        status = "failed" if failure else "missing"
        reason = failure or _how_far(folder, plan.recipe.schedule.epochs)
    return OpenRun(
        mixer=mixer.label,
        seed=seed,
        folder=folder.relative_to(plan.out).as_posix(),
        status=status,
        reason=reason,
    )


def _read_done(plan: Plan, mixer: PlannedMixer, seed: int, images: SameImages) -> Finished:
    folder = plan.folder(mixer, seed)
    try:
        there = read_finished(folder)
    except UserError as error:
        raise UserError(
            f"{str(error).rstrip('.')}. Run the same `keymix compare` command again: it writes the "
            "file from the run's checkpoint, or else trains the run again"
        ) from None
    _check_recipe(there.recipe, plan.recipe_for(mixer, seed))
    summary = there.summary
    data, task = summary.data, summary.data.task_kind
    changed = SameImages.of(data).changed(images)
    if changed:
        raise UserError(
            f"it was trained on other images ({' and '.join(changed)} differ). Move its folder "
            "away to train it again."
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
        for line in there.lines
    )
    run = DoneRun(
        mixer=mixer.label,
        seed=seed,
        folder=folder.relative_to(plan.out).as_posix(),
        status="done",
        reason=None,
        seconds=summary.seconds,
        last=_mark(summary.last, task, page),
        best=_mark(summary.best, task, page),
        history=history,
        trained_with=0,
    )
    found = Finished(
        run=run,
        answers=there.answers,
        details=summary.last.test.own,
        environment=lines(there.environment),
        data=data,
    )
    return replace(found, run=replace(run, own=Own.of(page.keep_run(found.tested, data))))


def _check_recipe(there: Recipe, wanted: Recipe) -> None:
    """Refuse a folder that somebody filled with another run.

    Images may be in another place on another machine: their fingerprint is checked instead.
    """
    for key, found, here in differences(there.to_dict(), wanted.to_dict()):
        if key not in _HERE:
            raise UserError(
                f"its folder holds another run: {key} is {found!r} there and {here!r} here. Move "
                "it away to train this one."
            )


def _how_far(folder: Path, epochs: int) -> str:
    path = folder / METRICS
    done = len(read_metrics(path)) if path.exists() else 0
    if not done:
        return NOT_STARTED
    return f"it is not finished: {done} of {epochs} epochs are done"


def _mark(tested: Tested, task: Task, page: Page) -> Mark:
    keys = [*(score.key for score in task.scores), *([LOSS] if task.validation_loss else [])]
    test: dict[str, Number | None] = {key: _finite(tested.test.scores.get(key)) for key in keys}
    for key in (*(score.key for score in page.test_scores), *page.test_numbers):
        value = tested.test.own.values.get(key)
        test[key] = _finite(value) if isinstance(value, int | float) else None
    return Mark(
        epoch=tested.epoch + 1,
        val={key: _finite(tested.val.get(key)) for key in keys},
        test=test,
    )


def _finite(value: Number | None) -> Number | None:
    return value if value is not None and np.isfinite(value) else None


def _needed(value: Number | None) -> Number:
    if value is None:
        raise ValueError("a finished run has no score")
    return value
