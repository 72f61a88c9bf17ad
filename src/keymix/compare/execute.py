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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from keymix.analysis.memory import fresh_python
from keymix.compare.events import Event, Watcher
from keymix.compare.question import Plan
from keymix.compare.runs import ERROR, log_of, read_error
from keymix.compare.worker import NO_DISK, Lines, run
from keymix.data.dataset import ImageData
from keymix.errors import Interrupted, KeymixWarning, UserError, WriteError
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
    if course.waiting and plan.processes > 1 and hasattr(os, "fork"):
        _train_side_by_side(plan, course)
        return
    try:
        for number in course.waiting:
            course.start(number)
            course.end(number, run(plan.out, number, data=data, on_epoch=course.look))
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
                    number = course.waiting.popleft()
                    course.start(number)
                    processes.start(number)
                for number, code in processes.ended(POLL):
                    course.end(number, code)
                course.look()
                interrupts.look()
        except Interrupted as stop:
            busy, saved = len(processes.running), processes.stop()
            text = f"{saved} of {busy} runs under way ended in order; {resume_hint(plan.out)}"
            raise _stopped(stop.signum, text) from None
        except WriteError:  # no other run would fare better
            processes.stop()
            raise


def resume_hint(out: Path) -> str:
    """Say what is kept when a comparison is stopped, and how to resume it."""
    kept = f"runs and checkpoints are kept in {str(out)!r}"
    return f"{kept}; rerun the same command (without --overwrite) to resume"


def _stopped(signum: int, text: str) -> Interrupted:
    return Interrupted(signum, f"stopped by {signal.Signals(signum).name}: {text}")


# ---- what happens, as events ------------------------------------------------------------------


class Course:
    """The runs that wait, by their number in the plan, and what happens to them, as events."""

    def __init__(self, plan: Plan, data: ImageData, watch: Watcher) -> None:
        self._plan, self._score, self._watch = plan, data.task.score, watch
        self._epochs: dict[int, NewEpochs] = {}
        pairs = plan.pairs
        left = (k for k, pair in enumerate(pairs) if not is_finished(plan.folder(*pair)))
        self.waiting = deque(left)
        watch(Event(kind="plan", done=len(pairs) - len(self.waiting), total=len(pairs)))

    def start(self, number: int) -> None:
        """Report that a run starts."""
        mixer, seed = self._plan.pairs[number]
        self._epochs[number] = NewEpochs(self._plan.folder(mixer, seed) / METRICS)
        self._watch(Event(kind="start", mixer=mixer.label, seed=seed))

    def look(self) -> None:
        """Report the epochs that ended since the last look, in every run under way."""
        for number, epochs in self._epochs.items():
            mixer, seed = self._plan.pairs[number]
            for line in epochs.read():
                value = line.val.get(self._score.key)
                self._watch(
                    Event(
                        kind="epoch",
                        mixer=mixer.label,
                        seed=seed,
                        epoch=line.epoch + 1,
                        epochs=self._plan.recipe.schedule.epochs,
                        value=value,
                        shown="" if value is None else self._score.text(value),
                        text=self._score.name,
                    )
                )

    def end(self, number: int, code: int) -> None:
        """Report that a run is done, or failed for the reason that its folder has."""
        self.look()
        del self._epochs[number]
        mixer, seed = self._plan.pairs[number]
        if code == 0:
            self._watch(Event(kind="done", mixer=mixer.label, seed=seed))
        else:
            text = read_error(self._plan.folder(mixer, seed))
            self._watch(Event(kind="failed", mixer=mixer.label, seed=seed, text=text))


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


class Processes:
    """The process from which runs are forked, see `keymix.compare.worker`, and those under way."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        command, environment = fresh_python("keymix.compare.worker")
        # CUDA is looked for without touching it, which a forked process could not use then
        environment |= {"OMP_NUM_THREADS": str(plan.threads), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
        )
        assert self._process.stdout is not None
        self._messages = Lines(self._process.stdout.fileno())
        self._no_disk = ""
        self.running: set[int] = set()
        self._ask(imports=plan.imports, recipe=plan.recipe.to_dict(), out=str(plan.out))

    def __enter__(self) -> Processes:
        """Start no run yet."""
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

    def start(self, number: int) -> None:
        """Fork a process for a run."""
        self.running.add(number)
        self._ask(run=number)

    def ended(self, seconds: float) -> Iterator[tuple[int, int]]:
        """Yield the runs that have ended and their exit codes; wait for some seconds at most."""
        ready, _, _ = select.select([self._messages.pipe], [], [], seconds)
        for message in self._messages.read() if ready else ():
            if "warning" in message:
                warnings.warn(message["warning"], KeymixWarning, stacklevel=2)
            elif "failed" in message:
                raise UserError(f"no run can be started: {message['failed']}")
            elif "no_disk" in message:
                self._no_disk = message["no_disk"]
            else:
                self.running.remove(message["run"])
                if message["code"] != NO_DISK:
                    self._see_to(message["run"], message["code"])
                    yield message["run"], message["code"]
        if self._no_disk:
            raise WriteError(self._no_disk)
        if self._messages.ended:
            raise UserError(
                f"the process that starts runs was killed; {resume_hint(self._plan.out)}"
            )

    def stop(self) -> int:
        """Ask all runs to save, wait for them a while, and return how many ended in order."""
        with suppress(OSError):
            self._ask(stop=True)
        saved, deadline = 0, time.monotonic() + GRACE
        while self.running and not self._messages.ended and time.monotonic() < deadline:
            with suppress(UserError):  # the first reason stands
                saved += sum(code in _SAVED for _, code in self.ended(POLL))
        return saved

    def _ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _see_to(self, number: int, code: int) -> None:
        """Leave the reason in the folder of a run whose process died, and no empty log."""
        place = self._plan.folder(*self._plan.pairs[number])
        log = log_of(place)
        said = log.read_text("utf-8", "replace").split("\n") if log.is_file() else [""]
        if said == [""]:
            log.unlink(missing_ok=True)
        if code in (*_SAVED, 1):
            return
        how = f"with code {code}"
        if code < 0:
            memory = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
            how = f"by signal {-code}{memory}"
        elif any(said):
            how = f"{how}: {[line for line in said if line][-1].strip()[:200]}"
        make_folder(place)
        write_text(place / ERROR, f"the training process ended {how}\n")
