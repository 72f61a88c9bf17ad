# SPDX-License-Identifier: Apache-2.0
"""``keymix`` commands in processes of their own, forked where PyTorch is imported already.

What only a process shows is shown here: signals, exit codes, what a disk or a death leaves behind.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
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


def server_address() -> dict[str, Any]:
    """Where the server that forks is; start it if need be. See `fork_workers`."""
    forkserver()  # what it is to import, before it starts
    multiprocessing.forkserver.ensure_running()
    server = vars(multiprocessing.forkserver._forkserver)
    names = ("_forkserver_address", "_forkserver_authkey")
    return {name: server[name] for name in names if name in server}


class Command:
    """A command that runs in a process group of its own.

    Args:
        words: Of the command line, without ``keymix``.
        folder: Takes what it says.
        largest: Bytes that its files may grow to.
        before: Called in the process first.
        forked: Whether workers of the command are forked, too: see `fork_workers`.
    """

    def __init__(
        self,
        *words: str,
        folder: Path,
        largest: int | None = None,
        before: Callable[[], object] | None = None,
        forked: bool = False,
    ) -> None:
        context = forkserver()
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / "stderr", folder / "stdout"
        if forked:
            before = partial(fork_workers, server_address())
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


def fork_workers(server: dict[str, Any] | None = None) -> None:
    """Let workers of comparisons in this process be forked, instead of started by a command.

    They begin with PyTorch imported; all that follows is what `keymix.compare.executor` does.

    Args:
        server: `server_address` of the process that started this one, which shares its server.
    """
    from keymix.compare import executor

    if server is not None:
        own = multiprocessing.forkserver._forkserver
        vars(own).update(server, ensure_running=lambda: None)
    vars(executor)["subprocess"] = SimpleNamespace(
        Popen=_Worker, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


class _Worker:
    """What `subprocess.Popen` is to an executor, of a process that is forked."""

    def __init__(self, command: list[str], *, stderr: Any, env: dict[str, str], **_: Any) -> None:
        assert command[-1] == "keymix.compare.executor"
        context = forkserver()
        calls, stdin = context.Pipe(duplex=False)
        stdout, replies = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_work,
            args=(calls, replies, Path(stderr.name).absolute(), env, *_inherited()),
        )
        self._process.start()
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        for end in (calls, replies):
            end.close()
        self.stdin = os.fdopen(os.dup(stdin.fileno()), "w", encoding="utf-8")
        self.stdout = os.fdopen(os.dup(stdout.fileno()), encoding="utf-8")
        for end in (stdin, stdout):
            end.close()
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            code: int | None = self._process.exitcode
            return code

    def wait(self, timeout: float | None = None) -> int:
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, signum)


def _inherited() -> tuple[Path, int, tuple[int, int]]:
    """What a process that is started by a command has from this one, and a forked one not."""
    return Path.cwd(), os.getpgrp(), resource.getrlimit(resource.RLIMIT_FSIZE)


def _work(
    calls: Connection,
    replies: Connection,
    log: Path,
    environment: dict[str, str],
    place: Path,
    group: int,
    largest: tuple[int, int],
) -> None:
    os.setpgid(0, group)
    resource.setrlimit(resource.RLIMIT_FSIZE, largest)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, stream in enumerate((calls.fileno(), replies.fileno(), written)):
        os.dup2(stream, number)
    for end in (calls, replies):
        end.close()
    os.close(written)
    sys.stdin = os.fdopen(0, encoding="utf-8")
    from keymix.compare import executor

    executor.main()
