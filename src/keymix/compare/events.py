# SPDX-License-Identifier: Apache-2.0
"""What a comparison reports while it runs: its events, and the time that is left by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, for whoever watches.

    Attributes:
        kind: ``plan`` (`done` of `total` runs are there already), ``estimate`` (how long it will
            take, in `text`), ``note`` (what was settled before training, in `text`), ``start``,
            ``epoch``, ``done``, ``failed``, ``elsewhere`` (what was about to start is another
            process's), or ``stage`` (a step after training, in `text`).
        mixer: Whose run.
        seed: Which run.
        epoch: Epochs done in it.
        epochs: Epochs planned.
        value: The score on validation that models are compared by, such as accuracy as a fraction.
        shown: The same as it is written, such as ``93.1 %`` or ``2.41 mm``.
        text: Why it failed, what is being done, or what the score of an epoch is.
        done: Runs that are finished.
        total: Runs of the comparison.
    """

    kind: Literal[
        "plan", "estimate", "note", "start", "epoch", "done", "failed", "elsewhere", "stage"
    ]
    mixer: str = ""
    seed: int = 0
    epoch: int = 0
    epochs: int = 0
    value: float | None = None
    shown: str = ""
    text: str = ""
    done: int = 0
    total: int = 0


Watcher = Callable[[Event], None]


class Remaining:
    """Follows a comparison's events and says how long its training will still take.

    What is left goes on at the mean pace of all epochs so far.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._begun = 0.0, 0.0  # runs, and when the first of them started
        self._first: dict[tuple[str, int], float] = {}  # parts of runs that were done before
        self._done: dict[tuple[str, int], float] = {}

    def see(self, event: Event) -> None:
        """Take an event into account."""
        run = (event.mixer, event.seed)
        if event.kind == "plan":
            self._left = event.total - event.done
        elif event.kind == "start" and not self._begun:
            self._begun = self._clock()
        elif event.kind == "epoch":
            self._first.setdefault(run, (event.epoch - 1) / event.epochs)
            self._done[run] = event.epoch / event.epochs
        elif event.kind in ("done", "failed"):
            self._first.setdefault(run, 1.0)
            self._done[run] = 1.0

    def seconds(self) -> float | None:
        """Return the seconds that are left now; None before the first epoch has ended."""
        done = sum(list(self._done.values()))
        now = done - sum(list(self._first.values()))
        if now <= 0:
            return None
        return (self._clock() - self._begun) / now * max(self._left - done, 0.0)
