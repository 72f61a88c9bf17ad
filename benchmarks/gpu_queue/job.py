# SPDX-License-Identifier: Apache-2.0
"""What a job of the queue is: steps, each a measurement in a process of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Result = dict[str, Any]  # plain values, as JSON holds them
_NAME = re.compile(r"[A-Za-z0-9._,=+-]+(/[A-Za-z0-9._,=+-]+)*")


class Unfinished(Exception):
    """Raised by a step that stopped in time and resumes where it stopped when it is run again.

    Args:
        progress: What to say of it, e.g. ``{"epochs": 80, "of": 200}``.
    """

    def __init__(self, progress: Result) -> None:
        super().__init__(str(progress))
        self.progress = progress


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where and how steps are measured.

    Args:
        device: ``cuda``, or ``cpu`` in a dry run.
        tiny: A dry run: the smallest sizes that go through all of the code, seconds in all.
        data: Folder with ``cifar10/*.parquet``; None without one.
        work: A folder of this step alone on the machine's own disk. It is there again when the
            step is run again on the same machine.
        keep: A folder for small files (metrics, logs) that leave the machine with the result.
        until: When the step must have ended or raised `Unfinished`, of `time.monotonic`.
        results: Results of the steps of this job that are done, by name.
    """

    device: str
    tiny: bool
    data: Path | None
    work: Path
    keep: Path
    until: float
    results: Mapping[str, Result] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds until the step must have ended."""
        return self.until - time.monotonic()

    @property
    def cifar10(self) -> str:
        """Data spec of CIFAR-10, or of the bundled digits in a dry run without it."""
        folder = None if self.data is None else self.data / "cifar10"
        if self.tiny and (folder is None or not folder.is_dir()):
            return "digits"
        return f"parquet:{folder}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measurement: the least that is measured at once, and again if it was cut short.

    Args:
        name: Of letters, digits and ``._,=+-``, in parts separated by ``/``; unique in its job.
        seconds: How long it takes by estimate, start of the process included.
        measure: Measures; returns the result, or raises `Unfinished`. What it imports belongs
            inside: the queue itself loads neither keymix nor the GPU.
        resumable: It resumes where it stopped, and so may be started with little time left.
        least: Seconds for which a resumable step is worth starting.
        packages: Modules that must be importable.
        data: Folders below the data folder that must be there.
        gpu_gib: Free memory of the GPU that it takes, GiB.
        after_all: It waits for the other jobs' steps: many like it would hold them up for days.
    """

    name: str
    seconds: float
    measure: Callable[[Context], Result]
    resumable: bool = False
    least: float = 60.0
    packages: Sequence[str] = ()
    data: Sequence[str] = ()
    gpu_gib: float = 4.0
    after_all: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"step {self.name!r}: give letters, digits and ._,=+- between /")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Steps that answer one question.

    Args:
        number: Place in the queue.
        name: Stem of its result file.
        title: A heading.
        purpose: Which question it answers, one or two sentences.
        form: What the result of a step holds, one line a field.
        steps: The steps in order; the argument says whether it is a dry run.
        section: Makes Markdown of the results that are done, by step name (at least one).
        side_by_side: How many resumable steps run at once on the one GPU, from the results that
            are done.
        estimate: Seconds of a step from the results that are done, where these say more than the
            step itself.
        always: Markdown that the page shows whether or not anything is measured.
    """

    number: int
    name: str
    title: str
    purpose: str
    form: Mapping[str, str]
    steps: Callable[[bool], Sequence[Step]]
    section: Callable[[Mapping[str, Result]], str]
    side_by_side: Callable[[Mapping[str, Result]], int] = lambda results: 1
    estimate: Callable[[Step, Mapping[str, Result]], float] = lambda step, results: step.seconds
    always: Callable[[], str] = lambda: ""

    @property
    def file(self) -> str:
        """Name of the result file."""
        return f"{self.number}-{self.name}.json"

    @property
    def source(self) -> str:
        """File that declares the job, by the function that lists its steps."""
        return self.steps.__code__.co_filename


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Make a Markdown table; columns after the first are aligned to the right."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
