# SPDX-License-Identifier: Apache-2.0
"""The time that is left while runs train: the estimate, corrected by what was seen so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keymix.compare.estimate import Estimate, side_by_side

if TYPE_CHECKING:
    from keymix.compare.events import Event

_Run = tuple[str, int]


@dataclass
class _Underway:
    """A run that trains.

    Args:
        left: Seconds that it will take yet, by the estimate, seen from `since`.
        since: When it started, or its last epoch ended.
        epochs: Epochs done; ``None`` before the first that was seen.
    """

    left: float
    since: float
    epochs: int | None = None


class Remaining:
    """Follows a comparison's events and tells how long it will take yet.

    Each mixer's runs go on as its epochs went so far; mixers that were not seen yet are as much
    slower or faster than estimated as all that was seen.

    Args:
        estimate: What was thought at the start.
        clock: Tells seconds.
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
