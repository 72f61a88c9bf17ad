# SPDX-License-Identifier: Apache-2.0
"""A step in a process of its own: what it leaves is its record, whatever becomes of it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_queue import machine, store
from gpu_queue.job import Context, Job, Result, Unfinished
from gpu_queue.jobs import jobs
from gpu_queue.processes import end_with_parent


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a process is to measure, in values that reach a fresh interpreter too.

    Args:
        job: Name of the job.
        step: Name of the step.
        tiny: A dry run.
        data: Folder of the data, or None.
        work: Folder of the queue on the machine's own disk.
        until: When to have ended, of ``time.monotonic``.
        threads: CPU threads of the process.
        before: Seconds that earlier starts of the step took.
        machine: Hardware and versions.
        results: Results of the job's steps that are done.
    """

    job: str
    step: str
    tiny: bool
    data: Path | None
    work: Path
    until: float
    threads: int
    before: float
    machine: Mapping[str, Any]
    results: Mapping[str, Result]

    @property
    def folder(self) -> Path:
        """Where the step works."""
        return self.work / "steps" / self.job / self.step

    @property
    def record(self) -> Path:
        """Where its record is kept."""
        return store.record_file(self.work / "records", self.job, self.step)

    @property
    def log(self) -> Path:
        """What the step printed."""
        return self.work / "logs" / self.job / f"{self.step.replace('/', '__')}.log"

    @property
    def keep(self) -> Path:
        """Small files of the step that leave the machine."""
        return self.work / "keep" / self.job / self.step


def look(device: str, answer: Connection) -> None:
    """Describe the machine from a process that may touch the GPU."""
    try:
        answer.send(machine.look(device))
    except Exception as error:  # whatever CUDA raises is the answer
        answer.send(f"{type(error).__name__}: {error}")


def measure(order: Order) -> None:
    """Measure a step and keep its record; the exit status is 1 where it failed."""
    started = time.monotonic()
    _alone(order)
    job = next(job for job in jobs() if job.name == order.job)
    step = next(step for step in job.steps(order.tiny) if step.name == order.step)
    context = Context(
        device="cpu" if order.tiny else "cuda",
        tiny=order.tiny,
        data=order.data,
        work=order.folder,
        keep=order.keep,
        until=order.until,
        results=order.results,
    )
    ended: dict[str, Any]
    further: list[str] = []
    try:
        result = step.measure(context)
        further = result.pop("_files", [])
        ended = {"state": "done", "result": result}
    except Unfinished as stopped:
        ended = {"state": "partial", "progress": stopped.progress}
    except Exception as error:  # any fault of a measurement is kept as its record
        traceback.print_exc()
        ended = {"state": "failed", "error": _short(error)}
    _keep(order, job, ended, order.before + time.monotonic() - started, further)
    sys.stdout.flush()
    sys.stderr.flush()
    # Leaves at once: threads of libraries, or a context of CUDA, must not hold up the queue.
    os._exit(1 if ended["state"] == "failed" else 0)


def cut(order: Order, seconds: float, *, failed: bool) -> None:
    """Keep the record of a step whose process ended without one.

    Args:
        order: The step.
        seconds: How long it ran this time.
        failed: It ended by itself, or took far longer than estimated; else time was up.
    """
    job = next(job for job in jobs() if job.name == order.job)
    text = order.log.read_text(errors="replace") if order.log.is_file() else ""
    ended: dict[str, Any] = {"state": "partial", "progress": {"cut short after s": round(seconds)}}
    if failed:
        ended = {"state": "failed", "error": f"ended without a result.\n{text[-1500:]}".strip()}
    everything = [*(store.ROOT / "src" / "keymix").rglob("*.py"), Path(job.source)]
    further = [path.resolve().relative_to(store.ROOT).as_posix() for path in everything]
    _keep(order, job, ended, order.before + seconds, further)


def _alone(order: Order) -> None:
    """Make the process a group of its own that ends with the queue and prints into its log."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for folder in (order.folder, order.keep, order.log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["OMP_NUM_THREADS"] = str(order.threads)
    machine.preload()
    import torch

    torch.set_num_threads(order.threads)


def _keep(
    order: Order, job: Job, ended: dict[str, Any], seconds: float, further: list[str]
) -> None:
    files = sorted({*store.loaded_files(sys.modules, job), *further})
    stored = store.Stored(
        **ended,
        seconds=round(seconds, 1),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=dict(order.machine),
        command=f"python benchmarks/gpu_queue/run.py --only {order.job}/{order.step}",
        files=files,
        digest=store.digest_of(files),
    )
    store.write_record(order.record, stored)


def _short(error: BaseException) -> str:
    """The end of a traceback, without the machine's folders."""
    lines = "".join(traceback.format_exception(error)).strip()
    return lines.replace(f"{store.ROOT}/", "")[-2000:]
