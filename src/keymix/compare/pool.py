# SPDX-License-Identifier: Apache-2.0
"""Run what is left of a comparison: in this process, or in a few long-lived ones side by side.

Small models gain little from a second thread, so on a CPU two processes of one thread each train
nearly twice as fast as one of two. Each worker keeps its libraries and data loaded between runs.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from keymix.compare.worker import Runner

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.recipe import DataConfig, Recipe

MOST_PROCESSES = 8
"""Default cap, for memory's sake."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to do."""

    mixer: str
    seed: int
    recipe: Recipe
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, for whoever watches.

    Args:
        kind: ``plan`` (`done` of `total` runs are there already), ``start``, ``epoch``, ``done``,
            ``failed``, or ``stage`` (a step after training, in `text`).
        mixer: Whose run.
        seed: Which run.
        epoch: Epochs done in it.
        epochs: Epochs planned.
        value: Validation accuracy, a fraction.
        text: Why it failed, or what is being done.
        done: Runs that are finished.
        total: Runs of the comparison.
    """

    kind: Literal["plan", "start", "epoch", "done", "failed", "stage"]
    mixer: str = ""
    seed: int = 0
    epoch: int = 0
    epochs: int = 0
    value: float | None = None
    text: str = ""
    done: int = 0
    total: int = 0


Watcher = Callable[[Event], None]
Failures = dict[tuple[str, int], str]


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
    """
    import torch

    failures: Failures = {}
    runner = Runner(data, log=logs / "worker0.log")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for job in jobs:
            watch(Event(kind="start", mixer=job.mixer, seed=job.seed))

            def report(metrics: Any, job: Job = job) -> None:
                watch(_epoch(job, metrics))

            failure = runner.train(job.recipe, job.folder, report)
            _settle(job, failure, failures, watch)
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
    """Train runs in several processes at once. Ctrl-C ends them; their runs resume next time.

    Args:
        jobs: The runs.
        processes: How many processes.
        threads: Threads of each.
        imports: Files that register mixers.
        logs: Folder of the workers' logs; a log without a line is removed at the end.
        watch: Gets an event for every start, epoch and end.

    Returns:
        Why runs failed, by mixer and seed.
    """
    failures: Failures = {}
    waiting = deque(jobs)
    events: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
    logs.mkdir(parents=True, exist_ok=True)
    workers: list[_Worker] = []

    def hire(slot: int) -> None:
        worker = _Worker(logs / f"worker{slot}.log", slot, threads, imports, events)
        workers.append(worker)
        assign(worker)

    def assign(worker: _Worker) -> None:
        if not waiting:
            worker.dismiss()
            return
        job = waiting.popleft()
        watch(Event(kind="start", mixer=job.mixer, seed=job.seed))
        worker.give(job)

    try:
        for slot in range(min(processes, len(jobs))):
            hire(slot)
        while any(worker.job is not None for worker in workers):
            worker, event = events.get()
            job = worker.job
            if job is None:
                continue
            if event is None:  # the process ended in the middle of a run
                worker.job = None
                _settle(job, worker.obituary(), failures, watch)
                if waiting:
                    hire(worker.slot)
            elif event["kind"] == "epoch":
                watch(_epoch(job, event["metrics"]))
            else:
                _settle(job, event.get("reason"), failures, watch)
                worker.job = None
                assign(worker)
    finally:
        for worker in workers:
            worker.end()
    return failures


def _epoch(job: Job, metrics: Any) -> Event:
    return Event(
        kind="epoch",
        mixer=job.mixer,
        seed=job.seed,
        epoch=int(metrics["epoch"]) + 1,
        epochs=int(metrics["epochs"]),
        value=float(metrics["val_top1"]),
    )


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
        self.slot, self.threads, self.imports = slot, threads, list(imports)
        self.job: Job | None = None
        self._log = log
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "keymix.compare.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environment,
                text=True,
                encoding="utf-8",
            )
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def _listen(self, events: queue.Queue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        answers: IO[str] | None = self._process.stdout
        if answers is not None:
            for line in answers:
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

    def obituary(self) -> str:
        """Say how the process ended, with the last line of its log."""
        code = self._process.wait()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        if code == -9:
            how += ", perhaps for lack of memory"
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()[:200]}" if lines and code > 0 else ""
        return f"the training process ended {how}{last}"

    def end(self) -> None:
        """End the process, whatever it does, and clear away an empty log.

        A busy one is killed: Lightning answers a gentler signal late, and a run that is killed
        at any moment resumes.
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
