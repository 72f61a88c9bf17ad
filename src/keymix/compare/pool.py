# SPDX-License-Identifier: Apache-2.0
"""Run what is left of a comparison: in this process, or in a few long-lived ones side by side.

Small models gain little from a second thread, so on a CPU two processes of one thread each train
nearly twice as fast as one of two. Each worker keeps its libraries and data loaded between runs.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from keymix.compare.estimate import Trial
from keymix.compare.events import Event, Failures, Job, Watcher
from keymix.compare.worker import Runner
from keymix.data.specs import task_name
from keymix.data.tasks import TASKS
from keymix.errors import Interrupted, KeymixWarning, WriteError
from keymix.train.signals import interruptible

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.recipe import DataConfig

GRACE = 10.0
"""Seconds that processes have to save when they are asked to end."""

MOST_PROCESSES = 8
"""Default cap, for memory's sake."""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_out(runs: int, processes: int | None, *, cuda: bool) -> tuple[int, int]:
    """Decide how many processes train side by side, and how many threads each gets.

    The answer rests on all runs of the comparison and not on those left, so that a resumed
    comparison computes with the threads it began with.

    Args:
        runs: Runs of the whole comparison.
        processes: What the user wants, ``None`` to decide here.
        cuda: Whether the models train on a GPU, which one process keeps busy.
    """
    if processes is None:
        processes = 1 if cuda else min(runs, cores(), MOST_PROCESSES)
    return processes, max(1, cores() // processes)


def run_here(
    jobs: Sequence[Job],
    *,
    threads: int,
    data: tuple[DataConfig, ImageData],
    logs: Path,
    watch: Watcher,
) -> Failures:
    """Train one run after another in this process; tracebacks go to a log in `logs`.

    Returns:
        Why runs failed, by mixer and seed.

    Raises:
        WriteError: If the disk does not take a file.
        Interrupted: On SIGINT or SIGTERM, with the run saved.
    """
    import torch

    failures: Failures = {}
    runner = Runner(data, log=logs / "worker0.log")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for job in jobs:
            if job.trial:
                watch(_tried(job, runner.try_out(job.recipe, job.trial)))
                continue
            watch(Event(kind="start", mixer=job.mixer, seed=job.seed))

            def report(metrics: Any, job: Job = job) -> None:
                watch(_epoch(job, metrics))

            failure = runner.train(job.recipe, job.folder, report)
            _settle(job, failure, failures, watch)
    except Interrupted as stop:
        raise Interrupted(stop.signum, f"{_by(stop.signum)}: {going_on(logs.parent)}") from None
    finally:
        torch.set_num_threads(before)
    return failures


def run_side_by_side(
    jobs: Sequence[Job],
    *,
    processes: int,
    threads: int,
    imports: Sequence[str],
    logs: Path,
    watch: Watcher,
) -> Failures:
    """Train runs in several processes at once.

    SIGINT and SIGTERM ask the processes to save and wait for them a while; a second one kills
    them. Either way their runs resume next time.

    Args:
        jobs: The runs.
        processes: How many processes.
        threads: Threads of each.
        imports: Files that register mixers.
        logs: Folder of the workers' logs; a log without a line is removed at the end.
        watch: Gets an event for every start, epoch and end.

    Returns:
        Why runs failed, by mixer and seed.

    Raises:
        WriteError: If the disk does not take a file.
        Interrupted: On SIGINT or SIGTERM; it says how many runs ended in order.
    """
    from keymix.train.files import make_folder

    make_folder(logs)
    out = logs.parent
    pool = _Pool(jobs, threads=threads, imports=imports, logs=logs, watch=watch)
    try:
        with interruptible(lambda: going_on(out)):
            try:
                pool.serve(processes)
            except Interrupted as stop:
                busy = [worker for worker in pool.workers if worker.job is not None]
                told = f"{_ask(busy)} of {len(busy)} runs under way ended in order; {going_on(out)}"
                raise Interrupted(stop.signum, f"{_by(stop.signum)}: {told}") from None
    finally:
        for worker in pool.workers:
            worker.end()
    return pool.failures


def going_on(out: Path) -> str:
    """Say what stands when a comparison is stopped, and how to go on."""
    kept = f"runs and checkpoints are kept in {str(out)!r}"
    return f"{kept}, and the same command (without --overwrite) goes on"


def _by(signum: int) -> str:
    return f"stopped by {signal.Signals(signum).name}"


def _ask(busy: Sequence[_Worker]) -> int:
    """Ask processes to save and end; return how many did in time."""
    for worker in busy:
        worker.ask()
    deadline = time.monotonic() + GRACE
    return sum(worker.ended_in_order(deadline) for worker in busy)


class _Pool:
    """The processes at work and the runs that wait for one."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        threads: int,
        imports: Sequence[str],
        logs: Path,
        watch: Watcher,
    ) -> None:
        self.workers: list[_Worker] = []
        self.failures: Failures = {}
        self._waiting = deque(jobs)
        self._threads, self._imports, self._logs = threads, imports, logs
        self._watch = watch
        self._events: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()

    def serve(self, processes: int) -> None:
        """Give out all runs and wait for their ends."""
        runs = sum(not job.trial for job in self._waiting)
        for slot in range(min(processes, runs)):
            self._hire(slot)
        while any(worker.job is not None for worker in self.workers):
            worker, event = self._events.get()
            if worker.job is not None:
                self._take(worker, worker.job, event)

    def _take(self, worker: _Worker, job: Job, event: dict[str, Any] | None) -> None:
        if event is None:  # the process ended in the middle of a run
            worker.job = None
            died = worker.obituary()
            if job.trial:
                self._watch(_tried(job, None))
            else:
                _settle(job, died, self.failures, self._watch)
            if self._waiting:
                self._hire(worker.slot)
        elif event["kind"] == "epoch":
            self._watch(_epoch(job, event["metrics"]))
        elif event["kind"] == "tried":
            self._watch(_tried(job, event["trial"]))
            worker.job = None
            self._assign(worker)
        elif event["kind"] == "warning":
            warnings.warn(event["text"], KeymixWarning, stacklevel=2)
        elif event["kind"] == "stopped":
            raise WriteError(event["reason"])
        elif event["kind"] == "interrupted":  # by another than us; the process ends, too
            worker.last_words = event["message"]
        else:
            _settle(job, event.get("reason"), self.failures, self._watch)
            worker.job = None
            self._assign(worker)

    def _hire(self, slot: int) -> None:
        log = self._logs / f"worker{slot}.log"
        worker = _Worker(log, slot, self._threads, self._imports, self._events)
        self.workers.append(worker)
        self._assign(worker)

    def _assign(self, worker: _Worker) -> None:
        if not self._waiting:
            worker.dismiss()
            return
        job = self._waiting.popleft()
        if not job.trial:
            self._watch(Event(kind="start", mixer=job.mixer, seed=job.seed))
        worker.give(job)


def _epoch(job: Job, metrics: Any) -> Event:
    task = TASKS[task_name(job.recipe.data.spec)]
    return Event(
        kind="epoch",
        mixer=job.mixer,
        seed=job.seed,
        epoch=int(metrics["epoch"]) + 1,
        epochs=int(metrics["epochs"]),
        value=float(metrics[f"val_{task.score}"]),
        text=task.told,
    )


def _tried(job: Job, times: Mapping[str, float] | None) -> Event:
    trial = None if times is None else Trial(**times)
    return Event(kind="tried", mixer=job.mixer, seed=job.seed, trial=trial)


def _settle(job: Job, failure: str | None, failures: Failures, watch: Watcher) -> None:
    if failure:
        failures[job.mixer, job.seed] = failure
        watch(Event(kind="failed", mixer=job.mixer, seed=job.seed, text=failure))
    else:
        watch(Event(kind="done", mixer=job.mixer, seed=job.seed))


class _Worker:
    """A worker process, a thread that listens to it, and the run it is busy with."""

    def __init__(
        self,
        log: Path,
        slot: int,
        threads: int,
        imports: Sequence[str],
        events: queue.Queue[tuple[_Worker, dict[str, Any] | None]],
    ) -> None:
        from keymix.analysis.memory import fresh_python
        from keymix.train.files import write_error

        self.slot, self.threads, self.imports = slot, threads, list(imports)
        self.job: Job | None = None
        self.last_words = ""
        self._log = log
        command, environment = fresh_python("keymix.compare.worker")
        try:
            stream = log.open("ab")
        except OSError as error:
            raise write_error(log, error) from error
        with stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environment | {"OMP_NUM_THREADS": str(threads)},
                text=True,
                encoding="utf-8",
            )
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def _listen(self, events: queue.Queue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        answers: IO[str] | None = self._process.stdout
        if answers is not None:
            for line in answers:
                with suppress(json.JSONDecodeError):  # of a process killed within a line
                    events.put((self, json.loads(line)))
        self._process.wait()
        events.put((self, None))

    def give(self, job: Job) -> None:
        self.job = job
        words = {
            "recipe": job.recipe.to_dict(),
            "folder": str(job.folder),
            "imports": self.imports,
            "threads": self.threads,
            "trial": job.trial,
        }
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(words) + "\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; the listener tells

    def dismiss(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def ask(self) -> None:
        """Tell the process to save and end."""
        self._process.terminate()

    def ended_in_order(self, deadline: float) -> bool:
        """Wait for the process to end after a save, or at once where no run has begun in it."""
        try:
            code = self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return code in (128 + signal.SIGTERM, -signal.SIGTERM)

    def obituary(self) -> str:
        """Say how the process ended, with the last line of its log."""
        code = self._process.wait()
        if self.last_words:
            return self.last_words
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        if code == -9:
            how += ", perhaps for lack of memory"
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()[:200]}" if lines and code > 0 else ""
        return f"the training process ended {how}{last}"

    def end(self) -> None:
        """End the process, whatever it does, and clear away an empty log.

        One that is still busy is killed: a run that is killed at any moment resumes.
        """
        if self._process.poll() is None:
            if self.job is None:
                self.dismiss()
            else:
                self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()
