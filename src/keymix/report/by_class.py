# SPDX-License-Identifier: Apache-2.0
"""What reports of tasks with classes share: each class's differences from the baseline, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from keymix.report import charts
from keymix.report.charts import FEW, Look, Spread
from keymix.report.record import ComparisonRecord, DoneRun

T = TypeVar("T")
Scores = Mapping[int, Sequence[float | None]]
"""Each class's score, by a run's seed."""


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that count, and how many test images have each; None if no run is finished."""

    names: tuple[str, ...]
    test_images: tuple[int, ...] | None


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
    *,
    of: Sequence[int] | None = None,
) -> ByClass:
    """Compare mixers with the baseline class by class; scores are sums over ``of`` inputs of each.

    Controls are in no chart and decide no order, unless there is nothing else.
    """
    of = of or [1] * len(names)
    shown = [label for label, runs in scores.items() if runs]
    others = [label for label in shown if label != baseline]
    base = scores[baseline]
    differences = {
        label: [_difference(scores[label], base, c, of[c]) for c in range(len(names))]
        for label in others
    }
    ranking = [label for label in others if looks[label].colour != "ctl"] or others
    largest = [
        max((abs(differences[label][c] or 0.0) for label in ranking), default=0.0)
        for c in range(len(names))
    ]
    order = sorted(range(len(names)), key=lambda c: -largest[c])
    spreads = [
        Spread(
            label=label,
            look=looks[label],
            values=[(names[c], differences[label][c]) for c in order],
        )
        for label in ranking
    ]
    known = [spread for spread in spreads if spread.known()]
    return ByClass(
        shown=shown,
        others=others,
        ranking=ranking,
        differences=differences,
        order=order,
        chart=charts.by_class(known, baseline=baseline) if known else None,
        total=len(names),
    )


def by_seed(
    record: ComparisonRecord, read: Callable[[DoneRun], T | None]
) -> dict[str, dict[int, T]]:
    """Read what the finished runs keep, by mixer and seed, without those that keep nothing."""
    return {
        label: {run.seed: kept for run in record.finished(label) if (kept := read(run)) is not None}
        for label in record.labels
    }


def mean(values: Iterable[float | None], of: int = 1) -> float | None:
    """Average the values that there are, each a sum over ``of`` inputs; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / (of * len(known)) if known and of else None


def _difference(runs: Scores, base: Scores, c: int, of: int) -> float | None:
    """Mixer minus baseline on a class, over the seeds that both finished."""
    pairs = [(scores[c], base[seed][c]) for seed, scores in runs.items() if seed in base]
    return mean((None if a is None or b is None else a - b for a, b in pairs), of)
