# SPDX-License-Identifier: Apache-2.0
"""What a comparison reports while it runs: its events, read from the folders of runs, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keymix.compare.question import Plan
from keymix.compare.runs import read_error
from keymix.task import Score
from keymix.train.callbacks import roughly
from keymix.train.files import METRICS, read_metrics
from keymix.train.folder import is_finished

LOOK = 0.25
"""Seconds between two looks at the epochs of runs under way, or for a run to start."""
GRACE = 10.0
"""Seconds that runs have to save when they are asked to end."""


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

    def __str__(self) -> str:
        seconds = self.seconds()
        return "" if seconds is None else f"about {roughly(seconds)} left"


def resume_hint(out: Path) -> str:
    """Say what is kept when a comparison is stopped, and how to resume it."""
    kept = f"runs and checkpoints are kept in {str(out)!r}"
    return f"{kept}; rerun the same command (without --overwrite) to resume"


class Course:
    """What happens to runs, by their number in the plan, as events."""

    def __init__(self, plan: Plan, score: Score, watch: Watcher) -> None:
        self._plan, self._score, self.watch = plan, score, watch
        self._epochs: dict[int, int] = {}  # seen so far, of the runs under way

    def start(self, number: int) -> None:
        """Report that a run starts."""
        mixer, seed = self._plan.pairs[number]
        self._epochs[number] = len(read_metrics(self._plan.folder(mixer, seed) / METRICS))
        self.watch(Event(kind="start", mixer=mixer.label, seed=seed))

    def look(self) -> None:
        """Report the epochs that ended since the last look, in every run under way.

        A run that resumes drops the lines behind its checkpoint first.
        """
        for number, seen in self._epochs.items():
            mixer, seed = self._plan.pairs[number]
            lines = read_metrics(self._plan.folder(mixer, seed) / METRICS)
            self._epochs[number] = len(lines)
            for line in lines[seen:]:
                value = line.val.get(self._score.key)
                self.watch(
                    Event(
                        kind="epoch",
                        mixer=mixer.label,
                        seed=seed,
                        epoch=line.epoch + 1,
                        epochs=self._plan.recipe.schedule.epochs,
                        value=value,
                        shown="" if value is None else self._score.text(value),
                        text=self._score.name,
                    )
                )

    def leave(self, number: int) -> None:
        """Report that another process has a run that was about to start."""
        del self._epochs[number]
        mixer, seed = self._plan.pairs[number]
        self.watch(Event(kind="elsewhere", mixer=mixer.label, seed=seed))

    def waits(self, numbers: Sequence[int], total: int) -> None:
        """Report that other processes train all runs that are left, the first of them by name."""
        runs = (self._plan.pairs[number] for number in numbers)
        names = [f"{mixer.label}, seed {seed}" for mixer, seed in runs]
        more = f"; {total - len(names)} more" if total > len(names) else ""
        text = f"waiting for runs that other processes train: {'; '.join(names)}{more}"
        self.watch(Event(kind="note", text=text))

    def end(self, number: int) -> None:
        """Report that a run is done, or failed for the reason that its folder has."""
        self.look()
        del self._epochs[number]
        mixer, seed = self._plan.pairs[number]
        place = self._plan.folder(mixer, seed)
        if is_finished(place):
            self.watch(Event(kind="done", mixer=mixer.label, seed=seed))
        else:
            text = read_error(place)
            self.watch(Event(kind="failed", mixer=mixer.label, seed=seed, text=text))
