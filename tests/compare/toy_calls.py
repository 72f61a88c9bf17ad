# SPDX-License-Identifier: Apache-2.0
"""What workers of tests are called for: quick functions, without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from keymix.errors import Interrupted, KeymixWarning, UserError, WriteError

ERRORS = {"user": UserError, "write": WriteError, "lookup": KeyError}

_made: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Pair:
    left: int
    right: tuple[str, ...]


def turned(pair: Pair) -> Pair:
    return Pair(left=-pair.left, right=pair.right[::-1])


def set_up(name: str) -> None:
    _made.append(name)


def fail_to_set_up() -> None:
    raise UserError("it cannot be set up")


def seen() -> tuple[str, ...]:
    """What this process was set up with, and its id."""
    return (*_made, str(os.getpid()))


def libraries() -> tuple[str, ...]:
    return tuple(name for name in ("torch", "numpy") if name in sys.modules)


def environment(name: str) -> str:
    return os.environ[name]


def fail(kind: str) -> None:
    raise ERRORS[kind]("wrong")


def end(code: int) -> None:
    sys.stderr.write("last words\n")
    sys.exit(code)


def leave(code: int) -> None:
    os._exit(code)


def die(signum: int) -> None:
    os.kill(os.getpid(), signum)
    signal.pause()


def warn(text: str) -> int:
    warnings.warn(text, KeymixWarning, stacklevel=1)
    warnings.warn("for the log", UserWarning, stacklevel=1)
    return 1


def say(text: str) -> int:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return 1


def half_a_reply() -> None:
    for descriptor in range(3, 20):  # one of them is the one that replies go to
        try:
            os.write(descriptor, b'{"kind": "res')
        except OSError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)


def wait_in(folder: str, name: str, how: str) -> int:
    """Wait until a signal comes: ``save`` on SIGTERM and end, or ``ignore`` it."""

    def stop(signum: int, frame: object) -> None:
        if how == "save":
            raise Interrupted(signum, "saved")

    signal.signal(signal.SIGTERM, stop)
    (Path(folder) / name).write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def ask() -> str:
    return input("a question that nobody sees")


def die_and_leave_a_child(child: str, end: str) -> None:
    if os.fork() == 0:
        Path(child).write_text(str(os.getpid()))
        while not Path(end).exists():
            time.sleep(0.01)
        os._exit(0)
    while not Path(child).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
