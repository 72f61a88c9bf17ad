# SPDX-License-Identifier: Apache-2.0
"""What a comparison reports while it runs: its events, and the time that is left by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from keymix.compare.eta import Estimate, side_by_side


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, for whoever watches.

    Attributes:
        kind: ``plan`` (`done` of `total` runs are there already), ``estimate`` (how long it will
            take, in `text`), ``note`` (what was settled before training, in `text`), ``start``,
            ``epoch``, ``done``, ``failed``, or ``stage`` (a step after training, in `text`).
        mixer: Whose run.
        seed: Which run.
        epoch: Epochs done in it.
        epochs: Epochs planned.
        value: The score on validation that models are compared by, such as accuracy as a fraction.
        shown: The same as it is written, such as ``93.1 %`` or ``2.41 mm``.
        text: Why it failed, what is being done, or what the score of an epoch is.
        done: Runs that are finished.
        total: Runs of the comparison.
        estimate: The estimate in numbers.
    """

    kind: Literal["plan", "estimate", "note", "start", "epoch", "done", "failed", "stage"]
    mixer: str = ""
    seed: int = 0
    epoch: int = 0
    epochs: int = 0
    value: float | None = None
    shown: str = ""
    text: str = ""
    done: int = 0
    total: int = 0
    estimate: Estimate | None = None


Watcher = Callable[[Event], None]

_Run = tuple[str, int]


@dataclass
class _Underway:
    """A run that trains."""

    left: float  # seconds that it will still take, by the estimate, counted from `since`
    since: float  # when it started, or its last epoch ended
    epochs: int | None = None  # epochs done; None before the first that was seen


class Remaining:
    """Follows a comparison's events and says how long it will still take.

    Each mixer's runs continue at the pace of its epochs so far; mixers without an epoch yet are
    as much slower or faster than estimated as all the others.
    """

    def __init__(self, estimate: Estimate, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._estimate, self._clock = estimate, clock
        self._waiting = dict(estimate.runs)
        self._underway: dict[_Run, _Underway] = {}
        self._seen: dict[str, float] = {}
        self._thought: dict[str, float] = {}

    def see(self, event: Event) -> None:
        """Take an event into account."""
        run, now = (event.mixer, event.seed), self._clock()
        if event.kind in ("start", "epoch") and run not in self._underway:
            # the first run may start while the last trial is still timed
            thought = self._waiting.pop(run, self._estimate.whole.get(event.mixer, 0.0))
            self._underway[run] = _Underway(left=thought, since=now)
        if event.kind == "epoch":
            mine = self._underway[run]
            epoch = self._estimate.whole.get(event.mixer, 0.0) / event.epochs
            if mine.epochs is not None:  # how far the first was behind it is not known
                done = event.epoch - mine.epochs
                self._seen[event.mixer] = self._seen.get(event.mixer, 0.0) + now - mine.since
                self._thought[event.mixer] = self._thought.get(event.mixer, 0.0) + done * epoch
            mine.epochs, mine.since = event.epoch, now
            mine.left = (event.epochs - event.epoch) * epoch
        elif event.kind in ("done", "failed"):
            self._underway.pop(run, None)
            self._waiting.pop(run, None)

    def seconds(self) -> float:
        """Return the seconds that are left now, the measuring after training included."""
        now = self._clock()
        # lists, since a thread that draws may ask while another takes an event
        busy = [
            max(0.0, run.left * self._factor(mixer) - (now - run.since))
            for (mixer, _), run in list(self._underway.items())
        ]
        waiting = [s * self._factor(mixer) for (mixer, _), s in list(self._waiting.items())]
        processes = max(self._estimate.processes, len(busy))
        return side_by_side(waiting, processes, busy) + self._estimate.after

    def _factor(self, mixer: str) -> float:
        thought = self._thought.get(mixer)
        if thought:
            return self._seen[mixer] / thought
        total = sum(list(self._thought.values()))
        return sum(list(self._seen.values())) / total if total else 1.0
