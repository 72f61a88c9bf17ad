# SPDX-License-Identifier: Apache-2.0
"""Run what is left of a comparison: in this process, or in a few long-lived ones side by side.

Small models gain little from a second thread, so on a CPU two processes of one thread each train
nearly twice as fast as one of two. Epochs are read from each run's ``metrics.jsonl``, so that any
executor that says when a call is done gives the same events.
"""

from __future__ import annotations

import concurrent.futures
import queue
import signal
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keymix.analysis.threads import use_threads
from keymix.compare.events import Event, Watcher
from keymix.compare.executor import (
    SynchronousExecutor,
    WorkerEnded,
    WorkerExecutor,
    reason,
)
from keymix.compare.question import Job, Plan
from keymix.compare.runs import DAMAGED
from keymix.data.dataset import ImageData
from keymix.data.specs import task_name
from keymix.errors import Interrupted, KeymixWarning, UserError, WriteError
from keymix.mixers.registry import import_file
from keymix.task import get_task
from keymix.train.checkpoints import DamagedRun
from keymix.train.engine import train
from keymix.train.files import METRICS, locked, read_metrics
from keymix.train.folder import is_finished
from keymix.train.model import load_data
from keymix.train.recipe import DataConfig, Recipe
from keymix.train.record import EpochLine
from keymix.train.signals import interruptible

POLL = 0.05
"""Seconds between two looks at the epochs of runs under way."""

GRACE = 10.0
"""Seconds that processes have to save when they are asked to end."""

_PATIENCE = 10.0
"""Seconds that a run's folder may stay with a worker whose parent was killed."""

Failures = dict[tuple[str, int], str]
"""Why runs failed, by mixer and seed."""
Pending = Collection[Future[Any]]
Wait = Callable[[Pending], Pending]


# ---- what an executor calls -----------------------------------------------------------------


class Runner:
    """Train runs one after another in this process; loaded data stay for the next run.

    `data` are images and the part of a recipe that they were loaded for.
    """

    def __init__(
        self,
        data: tuple[DataConfig, ImageData] | None = None,
        *,
        on_epoch: Callable[[], None] | None = None,
    ) -> None:
        self._data, self._on_epoch = data, on_epoch

    def train(self, recipe: Recipe, folder: str) -> None:
        """Train one run; SIGTERM raises Interrupted, as does SIGINT where it is not ignored."""
        images, after, place = self._images(recipe), self._on_epoch, Path(folder)
        trained = partial(
            train,
            recipe,
            place,
            progress=None if after is None else lambda line: after(),
            data=images,
            threads=torch.get_num_threads(),
        )
        if place.exists():
            with locked(place, "run", patience=_PATIENCE):
                pass  # a worker whose parent was killed a moment ago has let go of the run
        try:
            trained()
        except DamagedRun as error:
            move_away(place, error)
            trained()

    def _images(self, recipe: Recipe) -> ImageData:
        if self._data is None or self._data[0] != recipe.data:
            self._data = (recipe.data, load_data(recipe.data))
        return self._data[1]


def move_away(folder: Path, error: DamagedRun) -> None:
    """Rename the folder of a damaged run, so that the run can be done again, and warn."""
    aside = folder.with_name(f"{folder.name}{DAMAGED}")
    if aside.exists():
        raise UserError(f"move {str(aside)!r} away, which is there from before: {error.cause}")
    folder.rename(aside)
    text = f"{error.cause}; the run is moved to {str(aside)!r} and trained again"
    warnings.warn(text, KeymixWarning, stacklevel=3)


_runner = Runner()  # of a worker process


def set_up(imports: tuple[str, ...], threads: int) -> None:
    """Make a worker process ready: import the files that register things, limit its threads."""
    torch.set_num_threads(threads)
    for path in imports:
        import_file(path)


def train_run(recipe: Recipe, folder: str) -> None:
    """Train one run in a worker process: see `Runner.train`."""
    _runner.train(recipe, folder)


# ---- runs and their events ------------------------------------------------------------------


def train_runs(plan: Plan, data: ImageData, *, watch: Watcher) -> Failures:
    """Train the runs that are not done, one seed of all mixers after the other."""
    todo = [plan.job(m, seed) for m, seed in plan.pairs if not is_finished(plan.folder(m, seed))]
    jobs = [replace(job, score=data.task.score) for job in todo]
    watch(Event(kind="plan", done=len(plan.pairs) - len(jobs), total=len(plan.pairs)))
    if not jobs:
        return {}
    logs = plan.out / "runs"
    if plan.processes == 1:
        return run_here(
            jobs,
            threads=plan.threads,
            data=(plan.recipe.data, data),
            logs=logs,
            watch=watch,
        )
    return run_side_by_side(
        jobs,
        processes=plan.processes,
        threads=plan.threads,
        imports=plan.imports,
        logs=logs,
        watch=watch,
    )


def run_here(
    jobs: Sequence[Job],
    *,
    threads: int,
    data: tuple[DataConfig, ImageData],
    logs: Path,
    watch: Watcher,
) -> Failures:
    """Train one run after another in this process; tracebacks go to a log in `logs`.

    SIGINT and SIGTERM raise Interrupted, with the run saved.
    """
    schedule = Schedule(jobs, watch)
    runner = Runner(data, on_epoch=schedule.report_epochs)
    executor = SynchronousExecutor(logs / "worker0.log")
    try:
        with use_threads(threads):
            return schedule.run(executor, train=runner.train)
    except Interrupted as stop:
        raise Interrupted(stop.signum, f"{_by(stop.signum)}: {resume_hint(logs.parent)}") from None


def run_side_by_side(
    jobs: Sequence[Job],
    *,
    processes: int,
    threads: int,
    imports: Sequence[str],
    logs: Path,
    watch: Watcher,
) -> Failures:
    """Train runs in several processes of some threads each; `logs` is the folder of their logs.

    SIGINT and SIGTERM ask the processes to save and wait for them a while; a second one kills
    them. Either way their runs resume next time, and Interrupted says how many ended in order.
    """
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    slots = min(processes, len(jobs))
    if not slots:
        return {}
    out = logs.parent
    executor = WorkerExecutor(
        slots,
        logs=logs,
        name="training process",
        environment={"OMP_NUM_THREADS": str(threads)},
        initializer=set_up,
        initargs=(tuple(imports), threads),
        warn=said.put,
        grace=GRACE,
    )
    try:
        with interruptible(lambda: resume_hint(out)) as interrupts, interrupts.deferred():

            def wait(pending: Pending) -> Pending:
                done = wait_a_moment(pending)
                while not said.empty():
                    warnings.warn(said.get(), KeymixWarning, stacklevel=2)
                interrupts.look()  # here alone: within a future's lock it would stay locked
                return done

            schedule = Schedule(jobs, watch, slots=slots, wait=wait)
            try:
                failures = schedule.run(executor)
            except Interrupted as stop:
                busy = list(schedule.running)
                executor.shutdown(cancel_futures=True)
                ended = sum(map(_in_order, busy))
                text = f"{ended} of {len(busy)} runs under way ended in order; {resume_hint(out)}"
                raise Interrupted(stop.signum, f"{_by(stop.signum)}: {text}") from None
            except WriteError:
                executor.shutdown(cancel_futures=True)  # the others save what they can, in order
                raise
    finally:
        executor.kill_workers()
    return failures


def _in_order(future: Future[Any]) -> bool:
    """Whether a run that was asked to stop has saved, or had not begun; or came to its end."""
    if future.cancelled():
        return True
    error = future.exception()
    return error is None or (isinstance(error, WorkerEnded) and error.stopped)


def resume_hint(out: Path) -> str:
    """Say what is kept when a comparison is stopped, and how to resume it."""
    kept = f"runs and checkpoints are kept in {str(out)!r}"
    return f"{kept}; rerun the same command (without --overwrite) to resume"


def _by(signum: int) -> str:
    return f"stopped by {signal.Signals(signum).name}"


def wait_a_moment(pending: Pending) -> Pending:
    """Wait until a future is done, or for as long as `POLL`; return those that are done."""
    first = concurrent.futures.FIRST_COMPLETED
    return concurrent.futures.wait(pending, timeout=POLL, return_when=first).done


class Schedule:
    """Gives out runs to an executor, in order, and turns their course into events.

    At most `slots` calls are given to the executor at a time; `wait` returns those futures that
    are done, after a moment if none is.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        watch: Watcher,
        *,
        slots: int = 1,
        wait: Wait = wait_a_moment,
    ) -> None:
        self._waiting, self._watch = deque(jobs), watch
        self._slots, self._wait = slots, wait
        self.running: dict[Future[Any], Job] = {}
        self._epochs: dict[tuple[str, int], tuple[Job, NewEpochs]] = {}
        self._failures: Failures = {}

    def run(
        self,
        executor: Executor,
        *,
        train: Callable[[Recipe, str], None] = train_run,
    ) -> Failures:
        """Do all jobs by an executor, which may be any other than ours.

        A WriteError of a run ends them all: no other run would fare better on a full disk.
        """
        while self._waiting or self.running:
            while self._waiting and len(self.running) < self._slots:
                job = self._waiting.popleft()
                self._start(job)
                self.running[executor.submit(train, job.recipe, str(job.folder))] = job
            done = self._wait(self.running)
            self.report_epochs()  # of those that are done, too, before their ends
            for future in [future for future in self.running if future in done]:
                self._finish(future, self.running.pop(future))
        return self._failures

    def report_epochs(self) -> None:
        """Report the epochs that ended since the last look, in every run under way."""
        for job, epochs in self._epochs.values():
            score = job.score or get_task(task_name(job.recipe.data.spec)).score
            for line in epochs.read():
                value = line.val.get(score.key)
                self._watch(
                    Event(
                        kind="epoch",
                        mixer=job.mixer,
                        seed=job.seed,
                        epoch=line.epoch + 1,
                        epochs=job.recipe.schedule.epochs,
                        value=value,
                        shown="" if value is None else score.text(value),
                        text=score.name,
                    )
                )

    def _start(self, job: Job) -> None:
        self._epochs[job.mixer, job.seed] = job, NewEpochs(job.folder / METRICS)
        self._watch(Event(kind="start", mixer=job.mixer, seed=job.seed))

    def _finish(self, future: Future[Any], job: Job) -> None:
        error = future.exception()
        if isinstance(error, WriteError):
            raise error
        del self._epochs[job.mixer, job.seed]
        if error is None:
            self._watch(Event(kind="done", mixer=job.mixer, seed=job.seed))
        else:
            text = self._failures[job.mixer, job.seed] = reason(error)
            self._watch(Event(kind="failed", mixer=job.mixer, seed=job.seed, text=text))


class NewEpochs:
    """The lines that a run's ``metrics.jsonl`` gains, from now on; it need not exist yet.

    Every epoch replaces the file as a whole. A run that resumes drops the lines behind its
    checkpoint first, and trains those epochs again: their lines are new, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._status: tuple[int, ...] = ()
        self._lines: list[EpochLine] = []
        self.read()

    def read(self) -> list[EpochLine]:
        """Return the new lines."""
        try:
            found = self._path.stat()
        except OSError:
            return []
        status = (found.st_ino, found.st_size, found.st_mtime_ns)
        if status == self._status:
            return []
        lines = read_metrics(self._path)
        known = {line.epoch: line for line in self._lines}
        new = [line for line in lines if line != known.get(line.epoch)]
        self._status, self._lines = status, lines
        return new
