# SPDX-License-Identifier: Apache-2.0
"""Classes of masks on the page: how well each mixer finds each, and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from keymix.report import charts
from keymix.report.charts import FEW, Look, Spread
from keymix.report.record import ComparisonRecord
from keymix.tasks.segmentation.record import MaskScore, OfComparison, OfRun

Runs = Mapping[int, Sequence[MaskScore]]
"""Scores of each class, by a run's seed."""


@dataclass(frozen=True, kw_only=True)
class MaskRow:
    """A class and a mixer in the table; means over seeds, None where there are none.

    Args:
        name: The class.
        images: Test images that have it.
        mixer: The mixer's label.
        difference: Jaccard index minus that of the baseline.
        jaccard: Jaccard index.
        dice: Dice coefficient.
        hausdorff_mm: Hausdorff distance.
        missed: Images where only truth or prediction has the class.
    """

    name: str
    images: int
    mixer: str
    difference: float | None
    jaccard: float | None
    dice: float | None
    hausdorff_mm: float | None
    missed: float | None


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """The section of classes of masks.

    Args:
        rows: A row a class and mixer.
        others: Mixers but the baseline.
        ranking: Mixers in the chart.
        chart: The differences.
        total: Number of classes.
        unit: Unit of distances.
        few: Up to so many classes have a row each in the chart.
    """

    rows: list[MaskRow]
    others: list[str]
    ranking: list[str]
    chart: Markup | None
    total: int
    unit: str
    few: int = FEW


def by_class(record: ComparisonRecord, looks: Mapping[str, Look]) -> ByClass | None:
    """Make the table of classes, a row a class and mixer, with its chart; None without runs."""
    runs = {label: _scores(record, label) for label in record.labels}
    shown = [label for label, found in runs.items() if found]
    own = record.own.read(OfComparison)
    images = own.classes.test_images
    if not shown or images is None:
        return None
    baseline, names = record.baseline, own.classes.names
    others = [label for label in shown if label != baseline]
    differences = {
        label: [_difference(runs[label], runs[baseline], c) for c in range(len(names))]
        for label in others
    }
    ranking = [m for m in others if looks[m].colour != "ctl"] or others
    order = sorted(
        range(len(names)),
        key=lambda c: -max((abs(differences[m][c] or 0.0) for m in ranking), default=0.0),
    )
    rows = [
        MaskRow(
            name=names[c],
            images=images[c],
            mixer=label,
            difference=differences[label][c] if label in differences else None,
            jaccard=_mean([scores[c].jaccard for scores in runs[label].values()]),
            dice=_mean([scores[c].dice for scores in runs[label].values()]),
            hausdorff_mm=_mean([scores[c].hausdorff_mm for scores in runs[label].values()]),
            missed=_mean([scores[c].missed for scores in runs[label].values()]),
        )
        for c in (order if len(names) > FEW else range(len(names)))
        for label in shown
    ]
    return ByClass(
        rows=rows,
        others=others,
        ranking=ranking,
        chart=_chart(differences, ranking, [names[c] for c in order], order, looks, baseline),
        total=len(names),
        unit=own.hausdorff_unit or "mm",
    )


def _scores(record: ComparisonRecord, mixer: str) -> Runs:
    runs = {run.seed: run.own.read(OfRun).classes for run in record.finished(mixer)}
    return {seed: classes for seed, classes in runs.items() if classes is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _difference(runs: Runs, base: Runs, c: int) -> float | None:
    """Return mixer minus baseline in Jaccard of a class, over the seeds that both finished."""
    of_base = {seed: scores[c].jaccard for seed, scores in base.items()}
    pairs = [(scores[c].jaccard, of_base.get(seed)) for seed, scores in runs.items()]
    return _mean([None if a is None or b is None else a - b for a, b in pairs])


def _chart(
    differences: Mapping[str, Sequence[float | None]],
    ranking: Sequence[str],
    names: Sequence[str],
    order: Sequence[int],
    looks: Mapping[str, Look],
    baseline: str,
) -> Markup | None:
    spreads = [
        Spread(
            label=m,
            look=looks[m],
            values=[(name, differences[m][c]) for name, c in zip(names, order, strict=True)],
        )
        for m in ranking
    ]
    spreads = [spread for spread in spreads if spread.known()]
    if not spreads:
        return None
    return charts.by_class(spreads, baseline=baseline)
