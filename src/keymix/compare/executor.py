# SPDX-License-Identifier: Apache-2.0
"""Executors (`concurrent.futures`): long-lived worker processes, and the calling thread.

A worker that dies fails the future of its call alone, and the next call gets a new worker. Calls
and results are JSON, by `keymix.records`: a worker never imports the user's script, which needs no
``if __name__`` guard. ``python -m keymix.compare.executor`` is the program of a worker: it reads
calls as JSON lines from standard input and writes replies to what was standard output; what a
library prints goes to its log. It ends when standard input does, that is with its parent.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import inspect
import json
import os
import queue
import signal
import subprocess
import threading
import traceback
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, ParamSpec, TypeVar

from keymix.errors import Interrupted, KeymixWarning, UserError, WriteError
from keymix.records import from_json, to_json

P = ParamSpec("P")
T = TypeVar("T")

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a call may raise, of a user's mixer too, without ending its process."""

_STOP = 10.0  # seconds that an idle worker has to end


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a worker is to do."""

    function: str  # ``module:function``
    arguments: Mapping[str, Any]  # by name, as `to_json` writes them


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a worker writes: any number of warnings for the user, then one of the other kinds.

    These are a result, as `to_json` writes it, an error by what it means to the caller, or
    ``interrupted``: a signal ends the worker.
    """

    kind: Literal["result", "warning", "error", "user_error", "write_error", "interrupted"]
    value: Any = None
    text: str = ""


class CallError(RuntimeError):
    """A call raised something else than a `UserError` in its worker; its class and message."""


class WorkerEnded(RuntimeError):
    """A worker ended before its call did; of a signal, the exit code is negative."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    @property
    def stopped(self) -> bool:
        """Whether SIGTERM ended it, caught or not."""
        return self.exit_code in (128 + signal.SIGTERM, -signal.SIGTERM)


def reason(error: BaseException) -> str:
    """Write an error as one line of at most 300 characters."""
    words = " ".join(str(error).split())
    kind = type(error).__name__
    whole = isinstance(error, UserError | CallError | WorkerEnded)
    line = words if whole else f"{kind}: {words}" if words else kind
    return line if len(line) <= 300 else line[:299] + "…"


class SynchronousExecutor(Executor):
    """Make every call at once in the calling thread.

    What is not among `FAILURES` passes through `submit`: Ctrl-C and an exit end the caller. The
    file `log` gets the traceback of a call that fails.
    """

    def __init__(self, log: Path) -> None:
        self._log = log

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Make a call; the future is done when it is returned."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except WriteError as error:
            future.set_exception(error)
        except FAILURES as error:
            with suppress(OSError):
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("a", encoding="utf-8") as stream:
                    traceback.print_exc(file=stream)
            future.set_exception(error)
        return future


class WorkerExecutor(Executor):
    """Make calls in processes of their own, one call at a time in each.

    Processes start when they are needed and keep what they have imported and loaded. The functions
    are importable ones, and their annotations say how arguments and result are read from JSON.
    Their `UserError` and `WriteError` are raised as such, other errors as `CallError`.

    The folder `logs` gets ``worker<i>.log`` with standard error and tracebacks; a log without a
    line is removed at the end. `warn` gets the text of every `KeymixWarning` of a call, in a thread
    of the executor.
    """

    def __init__(
        self,
        max_workers: int,
        *,
        logs: Path,
        name: str = "worker process",  # for messages
        environment: Mapping[str, str] | None = None,  # variables that differ from this process's
        initializer: Callable[..., None] | None = None,  # which each process calls first
        initargs: Sequence[Any] = (),
        warn: Callable[[str], None],
        grace: float = 10.0,  # seconds that calls have to end on shutdown with `cancel_futures`
    ) -> None:
        first = None if initializer is None else _call(initializer, *initargs)
        self._workers = [
            _Worker(
                logs / f"worker{i}.log",
                name=name,
                environment=environment or {},
                first=first,
                warn=warn,
            )
            for i in range(max_workers)
        ]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self._workers):
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max_workers)
        self._futures: set[Future[Any]] = set()
        self._grace = grace

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Make a call in the next process that is free; after `shutdown` a RuntimeError.

        A TypeError refuses a function that cannot be imported by its name or lacks annotations,
        and an argument that is no record.
        """
        call = _call(fn, *args, **kwargs)
        returned = typing.get_type_hints(fn)["return"]

        def work() -> T:
            worker = self._idle.get()
            try:
                value = worker.make(call)
            finally:
                self._idle.put(worker)
            result: T = from_json(returned, value, where=f"the result of {call.function}")
            return result

        future = self._threads.submit(work)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and end the processes when the calls that were made are done.

        Without `wait` they end with this one at the latest. `cancel_futures` cancels calls that no
        process works at, and asks the others to end by SIGTERM; processes that have not done so
        after the grace are killed.
        """
        self._threads.shutdown(wait=False, cancel_futures=cancel_futures)
        if cancel_futures:
            for worker in self._workers:
                worker.end(subprocess.Popen.terminate)  # asked to save
            concurrent.futures.wait(list(self._futures), timeout=self._grace)
            self.kill_workers()
        if wait:
            self._threads.shutdown(wait=True)
            for worker in self._workers:
                worker.stop()

    def kill_workers(self) -> None:
        """Kill the processes that work at a call, end the others, and take no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end(subprocess.Popen.kill)
        for worker in self._workers:
            worker.stop()


class _Worker:
    """One process after another, each for as many calls as it lives, after its `first` one."""

    def __init__(
        self,
        log: Path,
        *,
        name: str,
        environment: Mapping[str, str],
        first: Call | None,
        warn: Callable[[str], None],
    ) -> None:
        self._log, self._name, self._environment = log, name, environment
        self._first, self._warn = first, warn
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._busy = self._closed = False
        self._log_start = 0  # where the lines of this process begin

    def make(self, call: Call) -> Any:
        """Make a call and return its result."""
        try:
            return self._answer(self._running(), call)
        finally:
            self._busy = False

    def _running(self) -> subprocess.Popen[str]:
        """The process, started if there is none."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor was shut down")
            self._busy = True
            process = self._process
            if process is not None:
                if process.poll() is None:
                    return process
                _close(process)  # it ended between two calls, or by a signal
            process = self._process = self._start()
        if self._first is not None:
            try:
                self._answer(process, self._first)
            except FAILURES:
                process.kill()  # the next call starts another
                process.wait()
                _close(process)
                raise
        return process

    def _start(self) -> subprocess.Popen[str]:
        from keymix.analysis.memory import fresh_python
        from keymix.train.files import make_folder, write_error

        make_folder(self._log.parent)
        command, environment = fresh_python("keymix.compare.executor")
        try:
            stream = self._log.open("ab")
        except OSError as error:
            raise write_error(self._log, error) from error
        with stream:
            self._log_start = stream.tell()
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**environment, **self._environment},
                text=True,
                encoding="utf-8",
            )

    def _answer(self, process: subprocess.Popen[str], call: Call) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended; so do its replies
            process.stdin.write(json.dumps(to_json(call)) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            try:
                reply = from_json(Reply, json.loads(line), where="a worker's reply")
            except ValueError:  # of a process that was killed within a line
                continue
            if reply.kind == "result":
                return reply.value
            if reply.kind == "warning":
                self._warn(reply.text)
            elif reply.kind == "interrupted":
                raise WorkerEnded(reply.text, process.wait())
            else:
                raise _ERRORS[reply.kind](reply.text)
        code = process.wait()
        _close(process)
        raise WorkerEnded(f"the {self._name} ended {self._exit_message(code)}", code)

    def _exit_message(self, code: int) -> str:
        """Say how the process ended, with the last line of its log."""
        if code < 0:
            memory = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
            return f"by signal {-code}{memory}"
        with suppress(OSError):
            text = self._log.read_bytes()[self._log_start :].decode("utf-8", errors="replace")
            lines = text.strip().splitlines()
            if lines and code:
                return f"with code {code}: {lines[-1].strip()[:200]}"
        return f"with code {code}"

    def end(self, how: Callable[[subprocess.Popen[str]], None]) -> None:
        """End the process, by SIGTERM or a kill, if it works at a call; start no other."""
        with self._lock:
            self._closed = True
            if self._busy and self._process is not None:
                how(self._process)

    def stop(self) -> None:
        """End the process, which has nothing to do, and remove an empty log."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(timeout=_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if not self._busy:  # else the thread that reads its replies closes them
                _close(process)
        with suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()


def _close(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):  # of a call that it did not read
            stream.close()


_ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "error": CallError,
    "user_error": UserError,
    "write_error": WriteError,
}


def _call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
    name = f"{fn.__module__}:{fn.__qualname__}"
    if fn.__module__ == "__main__" or _imported(name) is not fn:
        raise TypeError(f"{name} cannot be imported by a worker")
    signature = inspect.signature(fn)
    if not typing.get_type_hints(fn).keys() >= {*signature.parameters, "return"}:
        raise TypeError(f"{name} lacks annotations, by which a worker reads its arguments")
    arguments = signature.bind(*args, **kwargs).arguments
    return Call(function=name, arguments={key: to_json(arg) for key, arg in arguments.items()})


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _make(call: Call) -> Any:
    """Make a call in this process and return its result as JSON."""
    fn = _imported(call.function)
    hints = typing.get_type_hints(fn)
    arguments = {
        name: from_json(hints[name], value, where=f"the argument {name!r} of {call.function}")
        for name, value in call.arguments.items()
    }
    return to_json(fn(**arguments))


def main() -> NoReturn:
    """Answer calls until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    replies.write("\n")  # ends a line that was begun before

    def reply(kind: Any, text: str = "", value: Any = None) -> None:
        replies.write(json.dumps(to_json(Reply(kind=kind, text=text, value=value))) + "\n")
        replies.flush()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, KeymixWarning):
            reply("warning", str(message))  # for the parent's user
        else:
            log(message, category, *place, **more)

    def forked() -> None:
        """A loader writes no replies, and hides our end from the parent if it outlives us."""
        os.dup2(2, replies.fileno(), inheritable=False)
        warnings.showwarning = log

    log, warnings.showwarning = warnings.showwarning, show
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forked)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # nor do they, or their processes, read calls
    calls = _calls(requests)
    while True:
        call = calls.get()
        try:
            value = _make(call)
        except WriteError as error:
            reply("write_error", str(error))
        except Interrupted as stop:
            reply("interrupted", str(stop))
            os._exit(stop.exit_code)  # an exit in order would wait for the thread that reads
        except FAILURES as error:
            with suppress(OSError):
                traceback.print_exc()
            kind, text = type(error).__name__, str(error)
            if isinstance(error, UserError):
                reply("user_error", text)
            else:
                reply("error", f"{kind}: {text}" if text else kind)
        else:
            reply("result", value=value)


def _calls(requests: IO[str]) -> queue.SimpleQueue[Call]:
    """Read calls in a thread that ends the process when the parent is gone, busy or not.

    Otherwise a call whose parent was killed would run on while another process repeats it.
    """
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in requests:
                calls.put(from_json(Call, json.loads(line), where="a call"))
        finally:  # after a line of which the parent was killed, too
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return calls


if __name__ == "__main__":
    main()
