# SPDX-License-Identifier: Apache-2.0
"""Which step comes next, and the processes that measure."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_queue import child, machine, store
from gpu_queue.job import Job, Step
from gpu_queue.jobs import jobs

GRACE = 20.0
"""Seconds that a step has to save its state after SIGTERM."""
_WRITE = 5.0  # seconds kept for the last result files
_BREAK = 120.0  # seconds that a training loses from one command to the next: end, transfers, start
_METHODS = ("fork", "spawn")  # a fork has PyTorch loaded already, see `machine.PRELOADED`
_LOOK = 1.0  # s, at most, from one look at the clock and the signals to the next
_LATE = 3.0  # a step that takes so many times its estimate has failed
_LEAST = 60.0  # and so many seconds more, for short ones


@dataclass
class Running:
    """A step that runs now."""

    job: Job
    step: Step
    order: child.Order
    process: Any
    started: float
    until: float
    stamp: int  # of the record before
    asked: float | None = None  # when SIGTERM was sent


class Queue:
    """What is done, what is next, and the processes that measure.

    Args:
        tiny: A dry run, on the CPU.
        data: Folder of the data.
        results: Where result files go; those that lie there count.
        work: Folder on the machine's own disk.
        only: Patterns of ``job`` or ``job/step``; empty for all.
        again: Patterns of what is measured although its result exists.
        start: When the command started, of ``time.monotonic``.
        end: When it must have ended.
        lease: When the machine is given back; a training that cannot end by then is not started.

    Raises:
        ValueError: If a result file is none, or a pattern names no step.
    """

    def __init__(
        self,
        *,
        tiny: bool,
        data: Path | None,
        results: Path | None,
        work: Path,
        only: Sequence[str] = (),
        again: Sequence[str] = (),
        start: float,
        end: float = float("inf"),
        lease: float = float("inf"),
    ) -> None:
        self.tiny, self.data, self.results, self.work = tiny, data, results, work
        self.only, self.again = only, again
        self.start, self.end, self.lease = start, end, lease
        self.jobs = jobs()
        self.steps = {job.name: list(job.steps(tiny)) for job in self.jobs}
        for pattern in (*only, *again):
            if not any(_matches([pattern], *pair) for pair in self._every()):
                names = ", ".join(job.name for job in self.jobs)
                raise ValueError(f"no step is named {pattern!r}; the jobs are {names}")
        published = {} if tiny else store.read(store.RESULTS)
        earlier = {} if results is None else store.read(results)
        mine = store.read_records(work / "records")
        self.records = store.real(store.merge(published, earlier, mine), tiny=tiny)
        self.begun = store.real(mine, tiny=tiny)  # also where an older result hides it
        self.over: set[tuple[str, str]] = set()  # what this command has measured
        self.machine: dict[str, Any] = {}
        self.free_gib = float("inf")
        self.method: Any = multiprocessing.get_context("fork")
        self.stopping = False

    def _every(self) -> list[tuple[Job, Step]]:
        return [(job, step) for job in self.jobs for step in self.steps[job.name]]

    # ---- what there is to do ------------------------------------------------------------------

    def known(self, job: Job, step: Step) -> store.Stored | None:
        """What is known of a step."""
        stored = self.records.get(job.name, {}).get(step.name)
        begun = self.begun.get(job.name, {}).get(step.name)
        hidden = stored is not None and stored.state != "partial" and not stored.present
        if hidden and begun is not None and begun.state == "partial":
            return begun
        return stored

    def standing(self, job: Job, step: Step) -> str:
        """Say how a step stands: done, failed, partial, earlier code or not measured."""
        stored = self.known(job, step)
        if stored is None:
            return "not measured"
        if stored.state == "partial":
            return "partial"
        return stored.state if stored.present else "earlier code"

    def waiting(self) -> list[tuple[Job, Step]]:
        """List the open steps in order: what was never measured, then what earlier code gave."""

        def rank(pair: tuple[Job, Step]) -> tuple[bool, bool]:
            return self.standing(*pair) == "earlier code", pair[1].after_all

        return sorted((pair for pair in self._every() if self._open(*pair)), key=rank)

    def _open(self, job: Job, step: Step) -> bool:
        if self.only and not _matches(self.only, job, step):
            return False
        if (job.name, step.name) in self.over:
            return False
        again = _matches(self.again, job, step)
        return again or self.standing(job, step) not in ("done", "failed")

    def done(self, job: Job) -> dict[str, Any]:
        """Results of the steps that are done for the present code."""
        return {
            name: stored.result or {}
            for name, stored in self.records.get(job.name, {}).items()
            if stored.state == "done" and stored.present
        }

    def at_once(self, job: Job) -> int:
        """How many resumable steps of a job share the GPU."""
        return max(1, job.side_by_side(self.done(job)))

    def seconds(self, job: Job, step: Step) -> float:
        """Estimate what a step still takes: as measured on such a device, or as its job says."""
        stored = self.known(job, step)
        whole = job.estimate(step, self.done(job))
        if stored is None or self.machine.get("device") not in (None, stored.machine["device"]):
            return whole
        if stored.state == "done":
            return stored.seconds
        if stored.state == "failed":
            return whole
        if not step.resumable:
            return max(whole, 1.5 * stored.seconds)
        if not self.folder(job, step).is_dir():  # another machine's disk
            return whole
        progress = stored.progress or {}
        if progress.get("epochs") and progress.get("of"):
            whole = stored.seconds * progress["of"] / progress["epochs"]
        return max(whole - stored.seconds, 5.0)

    def folder(self, job: Job, step: Step) -> Path:
        """Where a step works on this machine, from its first start until it is done."""
        return self.work / "steps" / job.name / step.name

    def lacks(self, step: Step) -> list[str]:
        """List what a step needs and the machine has not."""
        found = [f"package {name}" for name in machine.missing(step.packages)]
        if self.tiny:
            return found
        folder = self.data
        found += [
            f"data {name}"
            for name in step.data
            if folder is None or not any((folder / name).glob("*.parquet"))
        ]
        if step.gpu_gib > self.free_gib:
            found.append(f"{step.gpu_gib:g} GiB of GPU memory ({self.free_gib:g} free)")
        return found

    def fits(self, job: Job, step: Step) -> bool:
        """Whether a step can be started with the minutes that are left."""
        now = time.monotonic()
        takes, left = self.seconds(job, step), self.last - now
        if step.resumable:
            command = self.end - self.start - GRACE - _WRITE
            breaks = math.ceil(max(0.0, takes - left) / max(command, 1.0))
            ends = takes + breaks * _BREAK <= self.lease - now
            return min(takes, step.least) <= left and ends
        return takes <= left

    @property
    def last(self) -> float:
        """When the last step must be asked to end."""
        return self.end - GRACE - _WRITE

    def following(self, running: Sequence[Running]) -> tuple[Job, Step] | None:
        """Choose the step to start now; measurements do not share the GPU, trainings may."""
        busy = {(one.job.name, one.step.name) for one in running}
        for job, step in self.waiting():
            if (job.name, step.name) in busy or self.lacks(step) or not self.fits(job, step):
                continue
            if not running:
                return job, step
            if not step.resumable or len(running) >= self.at_once(job):
                return None
            alike = all(one.job.name == job.name and one.step.resumable for one in running)
            return (job, step) if alike else None
        return None

    # ---- doing it -----------------------------------------------------------------------------

    def packages(self) -> bool:
        """Print which packages are missing and how to bring them; False where nothing can run."""
        wanted = [name for _, step in self.waiting() for name in step.packages]
        lacking = machine.missing(dict.fromkeys([*machine.NEEDED, *wanted]))
        if lacking:
            print(f"missing packages: {', '.join(lacking)}. On a machine with a network:")
            print(machine.how_to_bring(lacking))
        return not any(name in lacking for name in machine.NEEDED)

    def check(self) -> bool:
        """Look at the machine and print what it has; False where nothing can run."""
        machine.preload()
        found: Any = None
        for method in _METHODS:
            self.method = multiprocessing.get_context(method)
            here, there = self.method.Pipe(duplex=False)
            device = "cpu" if self.tiny else "cuda"
            process = self.method.Process(target=child.look, args=(device, there))
            process.start()
            there.close()
            try:
                found = here.recv() if here.poll(60) else "no answer within a minute"
            except EOFError:
                found = "it ended without an answer"
            process.kill()
            process.join()
            if isinstance(found, dict):
                break
            print(f"no GPU in a {method}ed process: {found}", file=sys.stderr)
        if not isinstance(found, dict):
            print("Nothing was measured: there is no GPU here that works.", file=sys.stderr)
            return False
        self.free_gib = found.pop("free_gib", float("inf"))
        self.machine = {**found, "dry_run": True} if self.tiny else found
        print(", ".join(f"{key} {value}" for key, value in found.items()), end="")
        print("" if self.tiny else f", {self.free_gib:g} GiB free")
        print(f"checked in {time.monotonic() - self.start:.0f} s", flush=True)
        return True

    def run(self) -> bool:
        """Measure until nothing is left that fits; False if a step failed."""
        running: list[Running] = []
        try:
            return self._run(running)
        finally:  # after a fault of the queue's own, such as a full disk
            for one in running:
                _signal(one.process, signal.SIGTERM)

    def _run(self, running: list[Running]) -> bool:
        good = True
        while True:
            for one in [one for one in running if not one.process.is_alive()]:
                running.remove(one)
                good &= self._ended(one)
            pair = None if self.stopping else self.following(running)
            if pair is not None:
                running.append(self._begin(*pair))
                continue
            if not running:
                return good
            for one in running:
                self._watch(one)
            nearest = min(one.until if one.asked is None else one.asked + GRACE for one in running)
            wait = min(max(nearest - time.monotonic(), 0.05), _LOOK)
            multiprocessing.connection.wait([one.process.sentinel for one in running], wait)

    def _begin(self, job: Job, step: Step) -> Running:
        now, takes = time.monotonic(), self.seconds(job, step)
        stored, folder = self.known(job, step), self.folder(job, step)
        if not step.resumable:
            shutil.rmtree(folder, ignore_errors=True)
        goes_on = stored is not None and stored.state == "partial" and folder.is_dir()
        limit = max(_LATE * takes, takes + _LEAST)
        until = self.last if step.resumable else min(self.last, now + limit)
        order = child.Order(
            job=job.name,
            step=step.name,
            tiny=self.tiny,
            data=self.data,
            work=self.work,
            until=until,
            threads=1 if self.tiny else max(1, (os.cpu_count() or 1) // self.at_once(job)),
            before=stored.seconds if stored is not None and goes_on else 0.0,
            machine=self.machine,
            results=self.done(job),
        )
        process = self.method.Process(target=child.measure, args=(order,))
        process.start()
        with contextlib.suppress(OSError):  # it does so itself, but perhaps not yet
            os.setpgid(process.pid, process.pid)
        print(f"{self._clock()} {job.name}/{step.name}: about {takes:.0f} s", flush=True)
        return Running(job, step, order, process, now, until, _stamp(order.record))

    def _watch(self, one: Running) -> None:
        """End a step whose time is up: first it may save its state."""
        now = time.monotonic()
        if one.asked is None and (self.stopping or now >= one.until):
            one.asked = now
            _signal(one.process, signal.SIGTERM)
        elif one.asked is not None and now >= one.asked + GRACE:
            _signal(one.process, signal.SIGKILL)

    def _ended(self, one: Running) -> bool:
        """Take in what a step left; False if it failed."""
        one.process.join()
        _signal(one.process, signal.SIGKILL)  # whatever it may have started
        name = (one.job.name, one.step.name)
        self.over.add(name)
        new = _stamp(one.order.record) != one.stamp
        failed = new and self._record(*name).state == "failed"
        if not new or (failed and one.asked is not None):  # then the signal made it fail
            late = one.until < self.last and not self.stopping
            lasted = time.monotonic() - one.started
            child.cut(one.order, lasted, failed=one.asked is None or late)
        stored = self._record(*name)
        if stored.state == "done":
            shutil.rmtree(one.order.folder, ignore_errors=True)
        self.records = store.merge(self.records, {name[0]: {name[1]: stored}})
        tail = stored.error.splitlines()[-1] if stored.error else stored.progress or ""
        print(
            f"{self._clock()} {'/'.join(name)}: {stored.state} in {stored.seconds:.0f} s {tail}",
            flush=True,
        )
        self.publish(one.job)
        return stored.state != "failed"

    def _record(self, job: str, step: str) -> store.Stored:
        return store.read_records(self.work / "records")[job][step]

    def publish(self, job: Job) -> None:
        """Write the result file of a job, and the small files of all."""
        if self.results is not None:
            store.write(self.results, [job], {job.name: self.records.get(job.name, {})})
            store.pack(self.work / "keep", self.results / store.ARCHIVE)

    def publish_here(self) -> None:
        """Write the files of all that was measured on this machine: RESULTS may be empty again."""
        if self.results is not None:  # before anything is measured that could not be kept
            self.results.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.results):
                pass
        here = store.real(store.read_records(self.work / "records"), tiny=self.tiny)
        for job in self.jobs:
            if here.get(job.name):
                self.publish(job)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
        return f"{minutes:2d}:{seconds:02d}"

    def summary(self) -> None:
        """Print what is done, what is next, and how many minutes that needs."""
        line = "{:<20}{:>8}{:>8}{:>14}{:>14}  {}"
        print("\n" + line.format("job", "done", "failed", "earlier code", "minutes left", "lacks"))
        for job in self.jobs:
            steps = self.steps[job.name]
            how = [self.standing(job, step) for step in steps]
            rest = [s for s, h in zip(steps, how, strict=True) if h not in ("done", "failed")]
            lacks = dict.fromkeys(what for step in rest for what in self.lacks(step))
            counts = f"{how.count('done')}/{len(steps)}"
            minutes = f"{self.minutes(job, rest):.1f}"
            print(
                line.format(
                    f"{job.number} {job.name}",
                    counts,
                    how.count("failed"),
                    how.count("earlier code"),
                    minutes,
                    ", ".join(lacks) or "-",
                )
            )
        if any(self.standing(*pair) == "failed" for pair in self._every()):
            print("a step that failed is repeated only with --again JOB/STEP")
        rest_of_all = [(job, step) for job, step in self.waiting() if not self.lacks(step)]
        if not rest_of_all:
            print("next: nothing that can be measured here")
            return
        job, step = rest_of_all[0]
        minutes = f"{(self.seconds(job, step) + GRACE + _WRITE) / 60:.1f}"
        print(f"next: {job.name}/{step.name}, needs {minutes} minutes. {job.purpose}")

    def minutes(self, job: Job, steps: Sequence[Step]) -> float:
        """Add up what steps still take; those that share the GPU take their share."""
        shared = self.at_once(job)
        return (
            sum(self.seconds(job, step) / (shared if step.resumable else 1) for step in steps) / 60
        )


def _matches(patterns: Sequence[str], job: Job, step: Step) -> bool:
    names = (job.name, f"{job.name}/{step.name}")
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)


def _stamp(record: Path) -> int:
    """Distinguish a record from the one before; 0 where there is none."""
    return record.stat().st_mtime_ns if record.is_file() else 0


def _signal(process: Any, number: int) -> None:
    """Signal a step and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
