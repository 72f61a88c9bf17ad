# SPDX-License-Identifier: Apache-2.0
"""Train what is left of a comparison: in this process, in a few side by side, or on Ray.

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
from contextlib import suppress

from keymix.analysis.memory import fresh_python
from keymix.compare.events import GRACE, LOOK, Course, Event, Watcher, resume_hint
from keymix.compare.on_ray import train_on_ray
from keymix.compare.question import Plan
from keymix.compare.runs import NAMED, Left
from keymix.compare.worker import run
from keymix.data.dataset import ImageData
from keymix.errors import Interrupted, KeymixWarning, UserError
from keymix.records import to_json
from keymix.train.files import InUse
from keymix.train.signals import Interrupts, interruptible


def train_runs(plan: Plan, data: ImageData, *, watch: Watcher, only: int | None = None) -> None:
    """Train the runs of a plan that are not done, or one, one seed of all mixers after the other.

    Those that other processes train are waited for, and taken over where such a process died. One
    that fails leaves its reason in its folder. SIGINT and SIGTERM let runs save and raise
    Interrupted, which says how to resume; a second one ends at once.
    """
    left = Left(plan, None if only is None else [only])
    watch(Event(kind="plan", done=left.total - len(left), total=left.total))
    course = Course(plan, data.task.score, watch)
    if left and only is None and plan.question.on is not None:
        train_on_ray(plan, course, left.numbers, train_runs)
        return
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
