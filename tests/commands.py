# SPDX-License-Identifier: Apache-2.0
"""``keymix`` commands in processes of their own, forked where PyTorch is imported already.

What only a process shows is shown here: signals, exit codes, what a disk or a death leaves behind.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 250  # seconds, on a machine that is busy with other things
_LOADED = ["keymix.compare.run", "keymix.train.engine", "keymix.train.runs"]


def wait_for(ready: Callable[[], object], alive: Callable[[], bool] = lambda: True) -> None:
    """Wait until a condition is true, as long as the process that makes it so is alive."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert alive(), "it ended before"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def forkserver() -> Any:
    """The context of processes that begin with PyTorch and keymix imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


class Command:
    """A command that runs in a process group of its own.

    Args:
        words: Of the command line, without ``keymix``.
        folder: Takes what it says.
        largest: Bytes that its files may grow to.
        before: Called in the process first.
    """

    def __init__(
        self,
        *words: str,
        folder: Path,
        largest: int | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        context = forkserver()
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / "stderr", folder / "stdout"
        self.process = context.Process(
            target=_run, args=(words, *self._said, dict(os.environ), Path.cwd(), largest, before)
        )
        self.process.start()

    @property
    def pid(self) -> int:
        """Number of the process, and of its group."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.is_alive()

    @property
    def err(self) -> str:
        """What it wrote to standard error until now."""
        return self._said[0].read_text("utf-8") if self._said[0].exists() else ""

    @property
    def out(self) -> str:
        """What it wrote to standard output until now."""
        return self._said[1].read_text("utf-8")

    def until(self, ready: Callable[[], object]) -> None:
        """Wait until a condition is true, which the command makes so."""
        wait_for(ready, lambda: self.alive)

    def signal(self, *signals: int) -> None:
        """Send signals, one after the other."""
        for signum in signals:
            os.kill(self.pid, signum)

    def ended(self, *signals: int) -> int:
        """Send signals, wait for the end, and return the exit code; minus a signal that killed."""
        self.signal(*signals)
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, self.err
        return self.process.exitcode

    def kill(self) -> None:
        """Kill the process and all that it started."""
        if self.alive:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, signal.SIGKILL)
        self.process.join(PATIENCE)


def _run(
    words: tuple[str, ...],
    err: Path,
    out: Path,
    environment: dict[str, str],
    place: Path,
    largest: int | None,
    before: Callable[[], object] | None,
) -> None:
    os.setpgrp()
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    for path, number in ((out, 1), (err, 2)):
        stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, number)
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    import torch

    from keymix.cli import main

    torch.set_num_threads(1)
    os.getloadavg = lambda: (0.0, 0.0, 0.0)
    if before is not None:
        before()
    sys.exit(main([*words]))
