# SPDX-License-Identifier: Apache-2.0
"""What reports of tasks with classes share: each class's differences from the baseline, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from markupsafe import Markup

from keymix.report import formats
from keymix.report.charts import Dots, Look, dots, rugs
from keymix.report.labels import shorten
from keymix.report.page import breakable
from keymix.report.part import SHARES
from keymix.report.record import DoneRun, Results
from keymix.report.svg import SIZE, svg
from keymix.report.tables import Cell, Column

FEW = 20
"""Classes up to which each has a row of its own."""
T = TypeVar("T")
Scores = Mapping[int, Sequence[float | None]]
"""Each class's score, by a run's seed."""


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


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """Differences by class; `others` are the mixers but the baseline, `ranking` those in the chart.

    `differences` are by mixer and class, `order` has the classes by number, the largest difference
    first, and up to `few` of `total` classes have a row each in the chart.
    """

    shown: list[str]
    others: list[str]
    ranking: list[str]
    differences: Mapping[str, Sequence[float | None]]
    order: list[int]
    chart: Markup | None
    total: int
    few: int = FEW


def by_class(
    scores: Mapping[str, Scores],
    names: Sequence[str],
    looks: Mapping[str, Look],
    baseline: str,
) -> ByClass:
    """Compare mixers with the baseline class by class.

    Controls are in no chart and decide no order, unless there is nothing else.
    """
    shown = [label for label, runs in scores.items() if runs]
    others = [label for label in shown if label != baseline]
    base = scores[baseline]
    differences = {
        label: [_difference(scores[label], base, c) for c in range(len(names))] for label in others
    }
    ranking = [label for label in others if not looks[label].neutral] or others
    largest = [
        max((abs(differences[label][c] or 0.0) for label in ranking), default=0.0)
        for c in range(len(names))
    ]
    order = sorted(range(len(names)), key=lambda c: -largest[c])
    drawn = [
        Dots(label, looks[label], [_points(differences[label][c]) for c in order])
        for label in ranking
        if any(value is not None for value in differences[label])
    ]
    return ByClass(
        shown=shown,
        others=others,
        ranking=ranking,
        differences=differences,
        order=order,
        chart=_chart([names[c] for c in order], drawn, baseline) if drawn else None,
        total=len(names),
    )


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


def mixer_column(look: Look, label: str, *, most_first: bool = False) -> Column:
    """Make a mixer's column in a table with a row for each class."""
    heading = Markup('<bdi title="{}">{}</bdi>').format(label, breakable(look.short))
    return Column(heading, label, "percent", label=look.short, most_first=most_first)


def compared(difference: float | None, score: float | None) -> Cell:
    """Write a class's difference from the baseline and its score, a fraction."""
    text = Markup('<span>{} <span class="pm">{}</span></span>')
    return Cell(difference, text.format(formats.points(difference), formats.percent(score)))


def _difference(runs: Scores, base: Scores, c: int) -> float | None:
    """Mixer minus baseline on a class, over the seeds that both finished."""
    pairs = [(scores[c], base[seed][c]) for seed, scores in runs.items() if seed in base]
    return mean(None if a is None or b is None else a - b for a, b in pairs)


def _points(difference: float | None) -> float | None:
    return None if difference is None else 100 * difference


def _chart(names: Sequence[str], series: Sequence[Dots], baseline: str) -> Markup:
    """Draw a row for each of few classes, or for each mixer where classes are many."""
    few = len(names) <= FEW
    x_label = f"difference from {shorten(baseline, 19)}, points"
    draw = partial(dots, names=names) if few else rugs
    return svg(
        partial(draw, series=series, x_label=x_label),
        name=f"Difference from {baseline} on each of {len(names)} classes",
        size=(SIZE[0], 22.0 * len(names) + 48 if few else 46.0 * len(series) + 48),
    )
