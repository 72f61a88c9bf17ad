# SPDX-License-Identifier: Apache-2.0
"""What tasks with classes keep and read of them, for `keymix.report.sections.classes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from keymix.report.part import ClassScores
from keymix.report.record import DoneRun, Results, Sparse
from keymix.report.tables import Column

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that count, and how many test images have each; None if no run is finished."""

    names: tuple[str, ...]
    test_images: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class OfRun(Sparse):
    """What the record keeps of a run and ``shares.js`` reads: figures of each class and image.

    `classes` has lists by key, the ``score`` among them; `shares` are scores of images, packed.
    """

    classes: Mapping[str, tuple[float | None, ...]] | None = None
    shares: str | None = None


def by_seed(record: Results, read: Callable[[DoneRun], T | None]) -> dict[str, dict[int, T]]:
    """Read what the finished runs keep, by mixer and seed, without those that keep nothing."""
    return {
        label: {run.seed: kept for run in record.finished(label) if (kept := read(run)) is not None}
        for label in record.labels
    }


def class_scores(
    record: Results,
    score: str,
    names: Mapping[int, str],
    counts: Mapping[str, Sequence[int]],
    further: Sequence[Column],
) -> ClassScores | None:
    """Gather the scores of some classes, by their numbers, and further figures as means over seeds.

    None without a finished run.
    """
    runs = by_seed(record, lambda run: run.own.read(OfRun).classes)
    if not any(runs.values()):
        return None
    return ClassScores(
        score=score,
        names=[*names.values()],
        scores={
            label: {seed: [run["score"][k] for k in names] for seed, run in of.items()}
            for label, of in runs.items()
        },
        counts={heading: [numbers[k] for k in names] for heading, numbers in counts.items()},
        further={
            column: {
                label: [mean(run[column.key][k] for run in of.values()) for k in names]
                for label, of in runs.items()
            }
            for column in further
        },
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Average the values that there are; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
