# SPDX-License-Identifier: Apache-2.0
"""What the parts of a comparison tell each other: the runs to do, and what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from keymix.compare.estimate import Estimate, Trial
    from keymix.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to do, or a trial of its first steps.

    Args:
        mixer: Whose run.
        seed: Which run.
        recipe: What to train.
        folder: Where.
        trial: If not 0, only a few steps are timed, for an estimate of so many runs in a row.
    """

    mixer: str
    seed: int
    recipe: Recipe
    folder: Path
    trial: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, for whoever watches.

    Args:
        kind: ``plan`` (`done` of `total` runs are there already), ``tried`` (a mixer's few steps
            were timed), ``estimate`` (how long it will take, in `text`), ``note`` (what was settled
            before training, in `text`), ``start``, ``epoch``, ``done``, ``failed``, or ``stage`` (a
            step after training, in `text`).
        mixer: Whose run.
        seed: Which run.
        epoch: Epochs done in it.
        epochs: Epochs planned.
        value: The score on validation that models are compared by, such as accuracy as a fraction.
        shown: The same as it is written, such as ``93.1 %`` or ``2.41 mm``.
        text: Why it failed, what is being done, or what the score of an epoch is.
        done: Runs that are finished.
        total: Runs of the comparison.
        trial: What the mixer's steps took, ``None`` if they failed.
        estimate: The estimate in numbers.
    """

    kind: Literal["plan", "tried", "estimate", "note", "start", "epoch", "done", "failed", "stage"]
    mixer: str = ""
    seed: int = 0
    epoch: int = 0
    epochs: int = 0
    value: float | None = None
    shown: str = ""
    text: str = ""
    done: int = 0
    total: int = 0
    trial: Trial | None = None
    estimate: Estimate | None = None


Watcher = Callable[[Event], None]
Failures = dict[tuple[str, int], str]
