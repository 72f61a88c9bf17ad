# SPDX-License-Identifier: Apache-2.0
"""Train what is left of a comparison, as events: in this process, or in a few side by side.

Small models gain little from a second thread, so on a CPU two processes of one thread each train
nearly twice as fast as one of two. What a run does is read from its folder. Where one process is
planned it is this one: mixers that a notebook registers are known here alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keymix.analysis.memory import fresh_python
from keymix.analysis.threads import use_threads
from keymix.compare import eta
from keymix.compare.costs import unmeasured
from keymix.compare.eta import Trial
from keymix.compare.events import Event, Watcher
from keymix.compare.plan import Job, Plan
from keymix.compare.runs import ERROR, log_of, read_error
from keymix.compare.worker import NO_DISK, Lines, run
from keymix.data.dataset import ImageData
from keymix.errors import Interrupted, KeymixWarning, UserError, WriteError
from keymix.records import from_json
from keymix.train.files import METRICS, make_folder, read_metrics, write_text
from keymix.train.folder import is_finished
from keymix.train.record import EpochLine
from keymix.train.signals import interruptible

POLL = 0.05
"""Seconds between two looks at the epochs of runs under way."""
GRACE = 10.0
"""Seconds that runs have to save when they are asked to end."""
_SAVED = (0, 128 + signal.SIGTERM, -signal.SIGTERM)  # exit codes of a run that was asked to end
_END = 10.0  # seconds that the process has which kills the runs that are left


def train_runs(plan: Plan, data: ImageData, *, watch: Watcher) -> None:
    """Train the runs of a stored plan that are not done, one seed of all mixers after the other.

    One that fails leaves its reason in its folder. SIGINT and SIGTERM let runs save and raise
    Interrupted, which says how to resume; a second one ends at once.
    """
    course = Course(plan, data, watch)
    if not course.waiting:
        return
    if plan.processes == 1 or not hasattr(os, "fork"):
        _train_here(plan, data, course)
    else:
        _train_side_by_side(plan, course)


def _train_here(plan: Plan, data: ImageData, course: Course) -> None:
    try:
        for number, job in course.waiting:
            course.start(number, job)
            if job.trial:
                course.tried(job, _trial(plan, job, data))
            else:
                course.end(number, job, run(plan.out, number, data=data, on_epoch=course.look))
    except Interrupted as stop:
        raise _stopped(stop.signum, resume_hint(plan.out)) from None


def _train_side_by_side(plan: Plan, course: Course) -> None:
    with (
        interruptible(lambda: resume_hint(plan.out)) as interrupts,
        interrupts.deferred(),
        Processes(plan) as processes,
    ):
        try:
            while course.waiting or processes.running:
                while course.waiting and len(processes.running) < plan.processes:
                    number, job = course.waiting.popleft()
                    course.start(number, job)
                    processes.start(number, job)
                for child in processes.ended(POLL):
                    if child.code == NO_DISK:  # no other run would fare better
                        raise WriteError(child.error)
                    if child.job.trial:
                        course.tried(child.job, child.trial)
                    else:
                        course.end(child.number, child.job, child.code)
                course.look()
                interrupts.look()
        except Interrupted as stop:
            busy, saved = len(processes.running), processes.stop()
            text = f"{saved} of {busy} runs under way ended in order; {resume_hint(plan.out)}"
            raise _stopped(stop.signum, text) from None
        except WriteError:
            processes.stop()
            raise


def resume_hint(out: Path) -> str:
    """Say what is kept when a comparison is stopped, and how to resume it."""
    kept = f"runs and checkpoints are kept in {str(out)!r}"
    return f"{kept}; rerun the same command (without --overwrite) to resume"


def _stopped(signum: int, text: str) -> Interrupted:
    return Interrupted(signum, f"stopped by {signal.Signals(signum).name}: {text}")


# ---- trials ---------------------------------------------------------------------------------


def trials_here(plan: Plan, jobs: Sequence[Job], data: ImageData) -> dict[str, Trial | None]:
    """Time a few steps of every mixer in this process."""
    return {job.mixer: _trial(plan, job, data) for job in eta.trial_jobs(plan, jobs)}


def _trial(plan: Plan, job: Job, data: ImageData) -> Trial | None:
    """Time a few steps of a mixer; None where they fail, as its runs will."""
    with suppress(Exception), use_threads(plan.threads):
        return eta.try_out(job.recipe, data, runs=job.trial)
    return None


def expected(plan: Plan, data: ImageData) -> str:
    """Say how long the runs that are left would take, by a trial of each mixer in this process."""
    jobs = [plan.job(m, seed) for m, seed in plan.pairs if not is_finished(plan.folder(m, seed))]
    trials, sizes = trials_here(plan, jobs, data), data.record().sizes
    found = eta.estimated(plan, jobs, trials, sizes=sizes, unmeasured=unmeasured(plan))
    return "all runs are finished" if found is None else found.text()


# ---- what happens, as events ------------------------------------------------------------------


class Course:
    """What waits, trials of mixers first and then runs by their number in the plan; as events."""

    def __init__(self, plan: Plan, data: ImageData, watch: Watcher) -> None:
        self._plan, self._sizes, self._watch = plan, data.record().sizes, watch
        self._score = data.task.score
        pairs = list(enumerate(plan.pairs))
        runs = [(k, plan.job(*p)) for k, p in pairs if not is_finished(plan.folder(*p))]
        watch(Event(kind="plan", done=len(pairs) - len(runs), total=len(pairs)))
        self._jobs = [job for _, job in runs]
        trials = eta.trial_jobs(plan, self._jobs) if runs else []
        self._to_try, self._trials = len(trials), dict[str, Trial | None]()
        self._epochs: dict[int, tuple[Job, NewEpochs]] = {}
        self.waiting = deque([*((-1, job) for job in trials), *runs])

    def tried(self, job: Job, trial: Trial | None) -> None:
        """Take a trial's times, None where it failed; the last one makes the estimate."""
        self._trials[job.mixer] = trial
        if len(self._trials) < self._to_try:
            return
        found = eta.estimated(
            self._plan,
            self._jobs,
            self._trials,
            sizes=self._sizes,
            unmeasured=unmeasured(self._plan),
        )
        if found is not None:
            self._watch(Event(kind="estimate", text=found.text(), estimate=found))

    def start(self, number: int, job: Job) -> None:
        """Report that a run starts."""
        if not job.trial:
            self._epochs[number] = job, NewEpochs(job.folder / METRICS)
            self._watch(Event(kind="start", mixer=job.mixer, seed=job.seed))

    def look(self) -> None:
        """Report the epochs that ended since the last look, in every run under way."""
        for job, epochs in self._epochs.values():
            for line in epochs.read():
                value = line.val.get(self._score.key)
                self._watch(
                    Event(
                        kind="epoch",
                        mixer=job.mixer,
                        seed=job.seed,
                        epoch=line.epoch + 1,
                        epochs=job.recipe.schedule.epochs,
                        value=value,
                        shown="" if value is None else self._score.text(value),
                        text=self._score.name,
                    )
                )

    def end(self, number: int, job: Job, code: int) -> None:
        """Report that a run is done, or failed for the reason that its folder has."""
        self.look()
        del self._epochs[number]
        if code == 0:
            self._watch(Event(kind="done", mixer=job.mixer, seed=job.seed))
        else:
            text = read_error(job.folder)
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
        self._status, self._lines = status, lines
        return [line for line in lines if line != known.get(line.epoch)]


# ---- processes ------------------------------------------------------------------------------


@dataclass
class Child:
    """A forked process: what it does, and how it ended."""

    number: int
    job: Job
    trial: Trial | None = None
    error: str = ""  # that its disk made
    code: int = 0


class Processes:
    """The process from which runs are forked, see `keymix.compare.worker`, and what it forked."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        command, environment = fresh_python("keymix.compare.worker")
        environment |= {"OMP_NUM_THREADS": str(plan.threads), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
        )
        assert self._process.stdout is not None
        self._messages = Lines(self._process.stdout.fileno())
        self.running: dict[int, Child] = {}
        self._started = 0
        self._ask(imports=plan.imports, recipe=plan.recipe.to_dict())

    def __enter__(self) -> Processes:
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        if not self.running:
            process.kill()  # it may be at its imports still
        with suppress(BrokenPipeError):
            process.stdin.close()  # it kills its children and ends
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def start(self, number: int, job: Job) -> None:
        """Fork a process for a run, or for a trial."""
        self._started += 1
        self.running[self._started] = Child(number, job)
        if job.trial:
            recipe, threads = job.recipe.to_dict(), self._plan.threads
            self._ask(id=self._started, trial=job.trial, recipe=recipe, threads=threads)
        else:
            log = str(log_of(job.folder))
            self._ask(id=self._started, run=number, out=str(self._plan.out), log=log)

    def ended(self, seconds: float) -> Iterator[Child]:
        """Yield the processes that have ended; wait for a message for some seconds at most."""
        ready, _, _ = select.select([self._messages.pipe], [], [], seconds)
        for message in self._messages.read() if ready else ():
            if "failed" in message:
                raise UserError(f"no training process can be started: {message['failed']}")
            child = self.running[message["id"]]
            if "warning" in message:
                warnings.warn(message["warning"], KeymixWarning, stacklevel=2)
            elif "trial" in message:
                child.trial = from_json(Trial, message["trial"], where="a trial")
            elif "error" in message:
                child.error = message["error"]
            else:
                del self.running[message["id"]]
                child.code = message["code"]
                if not child.job.trial:
                    self._see_to(child)
                yield child
        if self._messages.ended:
            raise UserError(
                "the process that starts training processes was killed; rerun to resume"
            )

    def stop(self) -> int:
        """Ask all runs to save, wait for them a while, and return how many ended in order."""
        with suppress(OSError):
            self._ask(stop=True)
        saved, deadline = 0, time.monotonic() + GRACE
        while self.running and (left := deadline - time.monotonic()) > 0:
            saved += sum(child.code in _SAVED for child in self.ended(left))
        return saved

    def _ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _see_to(self, child: Child) -> None:
        """Leave the reason in the folder of a run whose process died, and no empty log."""
        log, place = log_of(child.job.folder), child.job.folder
        said = log.read_text("utf-8", "replace").split("\n") if log.is_file() else []
        if said == [""]:
            log.unlink()
        if child.code in (*_SAVED, 1, NO_DISK):
            return
        how = f"with code {child.code}"
        if child.code < 0:
            memory = ", perhaps for lack of memory" if child.code == -signal.SIGKILL else ""
            how = f"by signal {-child.code}{memory}"
        elif any(said):
            how = f"{how}: {[line for line in said if line][-1].strip()[:200]}"
        make_folder(place)
        write_text(place / ERROR, f"the training process ended {how}\n")
