# SPDX-License-Identifier: Apache-2.0
"""Classes on the page: each mixer's accuracy on each, differences, and what is confused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from keymix.analysis.statistics import wilson
from keymix.report import charts
from keymix.report.charts import FEW, Look, Spread
from keymix.report.formats import percent
from keymix.report.record import ComparisonRecord
from keymix.tasks.classification.record import OfComparison, OfRun

Correct = Mapping[int, Sequence[int]]
"""Test images of each class that a run has right, by its seed."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A mixer's accuracy on a class and its difference from the baseline."""

    mixer: str
    accuracy: float | None
    difference: float | None


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    """A class in the table.

    Args:
        name: Its name.
        number: Its number.
        images: Test images of it.
        baseline: Accuracy of the baseline; None without images or runs.
        interval: Wilson's interval of that.
        cells: The other mixers.
        largest: The largest difference that decides the order of rows.
    """

    name: str
    number: int
    images: int
    baseline: float | None
    interval: tuple[float, float] | None
    cells: list[Cell]
    largest: float


@dataclass(frozen=True, kw_only=True)
class ConfusedPair:
    """A class taken for another: how often, and the share of the true class's answers."""

    true: str
    predicted: str
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Confused:
    """A mixer's most frequent confusions."""

    mixer: str
    pairs: list[ConfusedPair]


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """The section of classes.

    Args:
        rows: Largest differences first.
        others: Mixers but the baseline.
        ranking: Mixers that decide the order of rows.
        chart: The differences.
        note: What few test images leave open.
        confusions: By mixer.
        total: Number of classes.
        few: Up to so many classes have a row each in the chart.
    """

    rows: list[ClassRow]
    others: list[str]
    ranking: list[str]
    chart: Markup | None
    note: str
    confusions: list[Confused]
    total: int
    few: int = FEW


def by_class(record: ComparisonRecord, looks: Mapping[str, Look]) -> ByClass | None:
    """Make the table of classes with its chart and confusions; None if no run finished."""
    runs = {label: _correct(record, label) for label in record.labels}
    shown = [label for label, found in runs.items() if found]
    own = record.own.read(OfComparison)
    images = own.classes.test_images
    if not shown or images is None:
        return None
    baseline, names = record.baseline, own.classes.names
    accuracy = {label: _accuracy(runs[label], images) for label in shown}
    others = [label for label in shown if label != baseline]
    differences = {label: _differences(runs[label], runs[baseline], images) for label in others}
    ranking = [m for m in others if looks[m].colour != "ctl"] or others
    rows = []
    for number, (name, n) in enumerate(zip(names, images, strict=True)):
        base = accuracy[baseline][number] if baseline in accuracy else None
        told = [d for m in ranking if (d := differences[m][number]) is not None]
        rows.append(
            ClassRow(
                name=name,
                number=number,
                images=n,
                baseline=base,
                interval=wilson(base, n) if base is not None else None,
                cells=[
                    Cell(mixer=m, accuracy=accuracy[m][number], difference=differences[m][number])
                    for m in others
                ],
                largest=max(map(abs, told), default=0.0),
            )
        )
    rows.sort(key=lambda row: (-row.largest, row.number))
    return ByClass(
        rows=rows,
        others=others,
        ranking=ranking,
        chart=_chart(rows, differences, ranking, names, looks, baseline),
        note=_note(rows),
        confusions=_confusions(record, own, shown, images),
        total=len(rows),
    )


def _correct(record: ComparisonRecord, mixer: str) -> Correct:
    runs = {run.seed: run.own.read(OfRun).class_correct for run in record.finished(mixer)}
    return {seed: correct for seed, correct in runs.items() if correct is not None}


def _accuracy(runs: Correct, images: Sequence[int]) -> list[float | None]:
    """Return the accuracy on every class, mean over runs; ``None`` where no image is."""
    return [
        sum(correct[c] for correct in runs.values()) / (n * len(runs)) if n else None
        for c, n in enumerate(images)
    ]


def _differences(runs: Correct, base: Correct, images: Sequence[int]) -> list[float | None]:
    """Return mixer minus baseline on every class, over the seeds that both finished."""
    pairs = [(correct, base[seed]) for seed, correct in runs.items() if seed in base]
    return [
        sum(a[c] - b[c] for a, b in pairs) / (n * len(pairs)) if n and pairs else None
        for c, n in enumerate(images)
    ]


def _chart(
    rows: Sequence[ClassRow],
    differences: Mapping[str, Sequence[float | None]],
    ranking: Sequence[str],
    names: Sequence[str],
    looks: Mapping[str, Look],
    baseline: str,
) -> Markup | None:
    order = [row.number for row in rows]
    spreads = [
        Spread(
            label=m,
            look=looks[m],
            values=[(names[c], differences[m][c]) for c in order],
        )
        for m in ranking
    ]
    spreads = [spread for spread in spreads if spread.known()]
    if not spreads:
        return None
    return charts.by_class(spreads, baseline=baseline)


def _note(rows: Sequence[ClassRow]) -> str:
    """Say how few test images a class has and what that leaves open."""
    sizes = [row.images for row in rows if row.images]
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    text = (
        f"Each class has {low:,} test images."
        if low == high
        else f"A class has between {low:,} and {high:,} test images."
    )
    known = sorted(row.baseline for row in rows if row.baseline is not None)
    if known:
        middle = known[len(known) // 2]
        ends = wilson(middle, low)
        text += (
            f" On {low:,} images an accuracy of {percent(middle)} % is known to between "
            f"{percent(ends[0])} and {percent(ends[1])} % (Wilson's interval, 95 %)."
        )
    return (
        f"{text} Among so many pairs of class and mixer some large differences come about by "
        "chance: they say where to look, not what holds."
    )


def _confusions(
    record: ComparisonRecord, own: OfComparison, shown: Sequence[str], images: Sequence[int]
) -> list[Confused]:
    """Return each mixer's most frequent confusions, as a share of the true class's answers."""
    names, known = own.classes.names, own.confusions or {}
    table = []
    for label in shown:
        seeds = len(record.finished(label))
        pairs = [
            ConfusedPair(
                true=names[pair.true],
                predicted=names[pair.predicted],
                count=pair.count,
                share=pair.count / (images[pair.true] * seeds),
            )
            for pair in known.get(label, ())
        ]
        table.append(Confused(mixer=label, pairs=pairs))
    return table
