# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM: the first asks, at a moment that suits; the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from keymix.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Signals that arrived during a piece of work; `hint` says what is saved and how to resume."""

    def __init__(self, hint: Callable[[], str]) -> None:
        self.signum: int | None = None
        self.ended_wait: Interrupted | None = None
        self._hint = hint
        self._deferred = False
        self._grace = 0.0
        self._timer: threading.Timer | None = None
        self._process = os.getpid()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a first signal wait in ``signum`` for the work within to look at it."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    @contextmanager
    def waiting(self, *, grace: float = 0.0) -> Iterator[None]:
        """Let a first signal end the block, within `deferred` too: it only waits for data.

        The exception is kept as ``ended_wait``: whoever meets it may save what was done before.
        Where that cannot be saved yet, the wait may last `grace` seconds more: the next moment that
        suits then ends the work.
        """
        before, self._deferred, self._grace = self._deferred, grace > 0, grace
        try:
            if self.signum is not None:
                self._end_soon(self.signum)
            yield
        except Interrupted as stop:
            self.ended_wait = stop
            raise
        finally:
            self._deferred, self._grace = before, 0.0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _end_soon(self, signum: int) -> None:
        """Send the signal a second time when the grace of a wait is over."""
        if self._grace and self._timer is None:
            self._timer = threading.Timer(self._grace, os.kill, (os.getpid(), signum))
            self._timer.daemon = True
            self._timer.start()

    def look(self) -> None:
        """End the work here if a signal waits."""
        if self.signum is not None:
            raise self.stopped()

    def stopped(self) -> Interrupted:
        """Make the exception that ends the work, with what is saved now."""
        signum = self.signum or signal.SIGINT
        return Interrupted(signum, f"stopped by {signal.Signals(signum).name}: {self._hint()}")

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Take a signal, as a handler of Python's."""
        if os.getpid() != self._process:  # a loader's process, forked with this handler
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return  # Ctrl-C reaches all; the parent decides
        again, self.signum = self.signum is not None, signum
        if again or not self._deferred:
            raise self.stopped()
        self._end_soon(signum)


@contextmanager
def interruptible(hint: Callable[[], str]) -> Iterator[Interrupts]:
    """Turn SIGINT and SIGTERM into `Interrupted` for as long as the block runs.

    Outside the main thread, where Python handles no signals, nothing changes.
    """
    interrupts = Interrupts(hint)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    try:
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:  # those that the process ignores stay ignored
                signal.signal(signum, interrupts.handle)
        yield interrupts
    finally:
        for signum, handler in before.items():
            if handler is not None:  # None: installed by another than Python
                signal.signal(signum, handler)
