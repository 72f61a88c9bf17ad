# SPDX-License-Identifier: Apache-2.0
"""Jobs that measure nothing, but end in every way in which a step can end."""

from __future__ import annotations

import os
import signal
import time

from gpu_queue.job import Context, Job, Result, Step, Unfinished


def quick(context: Context) -> Result:
    (context.keep / "log.txt").write_text("kept")
    return {"value": 1.0}


def broken(context: Context) -> Result:
    raise RuntimeError("no such kernel")


def crashing(context: Context) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


TOGETHER = 1  # steps of `meeting` that wait for one another


def meeting(context: Context) -> Result:
    """End when as many as are to be have begun."""
    (context.work.parent / f"{context.work.name}.begun").touch()
    while len(list(context.work.parent.glob("*.begun"))) < TOGETHER:
        time.sleep(0.01)
    return {}


def counting(context: Context) -> Result:
    """Count to 3 and wait until asked to end; count from there to 8 at the next start."""
    file = context.work / "count"
    if file.is_file():
        return {"counted": 8, "from": int(file.read_text())}
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    file.write_text("3")
    while not asked:
        time.sleep(0.01)
    raise Unfinished({"epochs": 3, "of": 8})


def hanging(context: Context) -> Result:
    (context.work / "begun").touch()
    time.sleep(600)
    return {}


def falling(context: Context) -> Result:
    """Come as far as 3, fail, and resume from there."""
    file = context.work / "count"
    if file.is_file():
        return {"from": int(file.read_text())}
    file.write_text("3")
    raise MemoryError("no memory at 3")


def upset(context: Context) -> Result:
    """Fail when asked to end."""

    def fail(*_: object) -> None:
        raise OSError("compiler was killed")

    signal.signal(signal.SIGTERM, fail)
    (context.work / "begun").touch()
    time.sleep(600)
    return {}


def section(results: dict[str, Result]) -> str:
    return f"{len(results)} measured."


def job(number: int, name: str, *steps: Step, **more: object) -> Job:
    def listed(tiny: bool) -> tuple[Step, ...]:
        return steps

    return Job(
        number=number,
        name=name,
        title=name.title(),
        purpose=f"What {name} takes.",
        form={"value": "a number"},
        steps=listed,
        section=section,
        **more,  # type: ignore[arg-type]
    )
