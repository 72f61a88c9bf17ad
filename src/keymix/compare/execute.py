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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from keymix.analysis.memory import fresh_python
from keymix.compare.events import Event, Watcher
from keymix.compare.question import Plan
from keymix.compare.runs import NAMED, Left, read_error
from keymix.compare.worker import run
from keymix.data.dataset import ImageData
from keymix.errors import Interrupted, KeymixWarning, UserError
from keymix.records import to_json
from keymix.task import Score
from keymix.train.files import METRICS, InUse, read_metrics
from keymix.train.folder import is_finished
from keymix.train.signals import Interrupts, interruptible

LOOK = 0.25
"""Seconds between two looks at the epochs of runs under way, or for a run to start."""
GRACE = 10.0
"""Seconds that runs have to save when they are asked to end."""


def train_runs(plan: Plan, data: ImageData, *, watch: Watcher, only: int | None = None) -> None:
    """Train the runs of a plan that are not done, or one, one seed of all mixers after the other.

    Those that other processes train are waited for, and taken over where such a process died. One
    that fails leaves its reason in its folder. SIGINT and SIGTERM let runs save and raise
    Interrupted, which says how to resume; a second one ends at once.
    """
    left = Left(plan, None if only is None else [only])
    watch(Event(kind="plan", done=left.total - len(left), total=left.total))
    course = Course(plan, data.task.score, watch)
    if left and only is None and plan.processes > 1 and hasattr(os, "fork"):
        _train_side_by_side(plan, course)
        return
    idle = False
    try:
        while left:
            number = left.take()
            if number is None:
                if not idle:
                    course.waits(left.numbers[:NAMED], len(left))
                with interruptible(lambda: resume_hint(plan.out)):
                    time.sleep(LOOK)
            else:
                course.start(number)
                try:
                    if not left.failed(number):
                        run(plan, number, data=data, on_epoch=course.look)
                    course.end(number)
                except InUse:
                    left.put_back(number)
                    course.leave(number)
            idle = number is None
    except Interrupted as stop:
        text = f"stopped by {signal.Signals(stop.signum).name}: {resume_hint(plan.out)}"
        raise Interrupted(stop.signum, text) from None


def _train_side_by_side(plan: Plan, course: Course) -> None:
    """Train in processes that `keymix.compare.worker` forks; they are a process group."""
    command, environment = fresh_python("keymix.compare.worker")
    # CUDA is looked for without touching it, which a forked process could not use then
    environment |= {"OMP_NUM_THREADS": str(plan.threads), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with (
        interruptible(lambda: resume_hint(plan.out)) as interrupts,
        interrupts.deferred(),
        subprocess.Popen(
            [*command, str(plan.out), *plan.imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            process_group=0,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(to_json(plan)).encode() + b"\n")
            process.stdin.flush()
            _follow(process, course, interrupts)
        except Interrupted:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            raise
        finally:
            with suppress(OSError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise UserError(f"the process that starts runs has ended; {resume_hint(plan.out)}")


def _follow(process: subprocess.Popen[bytes], course: Course, interrupts: Interrupts) -> None:
    """Report what the processes do, until they have ended."""
    assert process.stdout is not None
    pipe, content, rest = process.stdout.fileno(), b"-", b""
    while content:
        if select.select([pipe], [], [], LOOK)[0]:
            content = os.read(pipe, 2**16)
            *lines, rest = (rest + content).split(b"\n")
            for message in map(json.loads, lines):
                if "warning" in message:
                    warnings.warn(message["warning"], KeymixWarning, stacklevel=2)
                elif "error" in message:
                    raise UserError(message["error"])
                elif "start" in message:
                    course.start(message["start"])
                elif "elsewhere" in message:
                    course.leave(message["elsewhere"])
                elif "waits" in message:
                    course.waits(message["waits"], message["of"])
                else:
                    course.end(message["end"])
        course.look()
        interrupts.look()
    process.wait()


def resume_hint(out: Path) -> str:
    """Say what is kept when a comparison is stopped, and how to resume it."""
    kept = f"runs and checkpoints are kept in {str(out)!r}"
    return f"{kept}; rerun the same command (without --overwrite) to resume"


class Course:
    """What happens to runs, by their number in the plan, as events."""

    def __init__(self, plan: Plan, score: Score, watch: Watcher) -> None:
        self._plan, self._score, self._watch = plan, score, watch
        self._epochs: dict[int, int] = {}  # seen so far, of the runs under way

    def start(self, number: int) -> None:
        """Report that a run starts."""
        mixer, seed = self._plan.pairs[number]
        self._epochs[number] = len(read_metrics(self._plan.folder(mixer, seed) / METRICS))
        self._watch(Event(kind="start", mixer=mixer.label, seed=seed))

    def look(self) -> None:
        """Report the epochs that ended since the last look, in every run under way.

        A run that resumes drops the lines behind its checkpoint first.
        """
        for number, seen in self._epochs.items():
            mixer, seed = self._plan.pairs[number]
            lines = read_metrics(self._plan.folder(mixer, seed) / METRICS)
            self._epochs[number] = len(lines)
            for line in lines[seen:]:
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

    def leave(self, number: int) -> None:
        """Report that another process has a run that was about to start."""
        del self._epochs[number]
        mixer, seed = self._plan.pairs[number]
        self._watch(Event(kind="elsewhere", mixer=mixer.label, seed=seed))

    def waits(self, numbers: Sequence[int], total: int) -> None:
        """Report that other processes train all runs that are left, the first of them by name."""
        runs = (self._plan.pairs[number] for number in numbers)
        names = [f"{mixer.label}, seed {seed}" for mixer, seed in runs]
        more = f"; {total - len(names)} more" if total > len(names) else ""
        text = f"waiting for runs that other processes train: {'; '.join(names)}{more}"
        self._watch(Event(kind="note", text=text))

    def end(self, number: int) -> None:
        """Report that a run is done, or failed for the reason that its folder has."""
        self.look()
        del self._epochs[number]
        mixer, seed = self._plan.pairs[number]
        place = self._plan.folder(mixer, seed)
        if is_finished(place):
            self._watch(Event(kind="done", mixer=mixer.label, seed=seed))
        else:
            text = read_error(place)
            self._watch(Event(kind="failed", mixer=mixer.label, seed=seed, text=text))
