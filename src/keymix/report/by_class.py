# SPDX-License-Identifier: Apache-2.0
"""What tasks with classes keep and read of them, for `keymix.report.sections.classes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from keymix.report.part import SHARES
from keymix.report.record import DoneRun, Results

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that count, and how many test images have each; None if no run is finished."""

    names: tuple[str, ...]
    test_images: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """What ``shares.js`` reads of a run: each image's share, packed, and each class's score."""

    shares: str | None
    classes: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """What ``shares.js`` reads: the classes, the level that is 1, and names of all test images."""

    classes: Classes
    levels: int = SHARES
    names: tuple[str, ...] | None


def by_seed(record: Results, read: Callable[[DoneRun], T | None]) -> dict[str, dict[int, T]]:
    """Read what the finished runs keep, by mixer and seed, without those that keep nothing."""
    return {
        label: {run.seed: kept for run in record.finished(label) if (kept := read(run)) is not None}
        for label in record.labels
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Average the values that there are; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
