# SPDX-License-Identifier: Apache-2.0
"""What reports of tasks with classes share: each class's differences from the baseline, ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from keymix.report import formats
from keymix.report.charts import WIDTH, Look, row_label
from keymix.report.labels import shorten, text_width
from keymix.report.page import breakable
from keymix.report.part import SHARES
from keymix.report.record import ComparisonRecord, DoneRun
from keymix.report.svg import Drawing, Scale, el, lower_axis, marker, number, ticks
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
        chart=drawn(known, baseline=baseline) if known else None,
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


# ---- charts ---------------------------------------------------------------------------------

CLASS_NAME = 118.0
"""Room for a class's name, px."""

BIN = 4.0
"""Width of a histogram's bar, px."""

_ROW, _HISTOGRAM = 22.0, 46.0


@dataclass(frozen=True)
class Spread:
    """One mixer's difference from the baseline on each class, in the order of the chart.

    Every spread of a chart names the same classes; ``None`` is a class without images.
    """

    label: str
    look: Look
    values: Sequence[tuple[str, float | None]]

    def known(self) -> list[tuple[str, float]]:
        """Return the classes that have a difference."""
        return [(name, value) for name, value in self.values if value is not None]


def drawn(spreads: Sequence[Spread], *, baseline: str) -> Markup:
    """Draw differences from the baseline: `dots` of few classes, `histograms` of many."""
    few = len(spreads[0].values) <= FEW
    return (dots if few else histograms)(spreads, baseline=baseline)


def dots(spreads: Sequence[Spread], *, baseline: str) -> Markup:
    """Draw one row per class with one dot per mixer."""
    names = [name for name, _ in spreads[0].values]
    left = 14 + min(CLASS_NAME, max(text_width(name) for name in names))
    foot = 8 + _ROW * len(names)
    drawing = Drawing()
    x = _differences(drawing, spreads, left, foot, baseline)
    for i, name in enumerate(names):
        y = 8 + _ROW * (i + 0.5)
        drawing.line((x.start, x.end), (y, y), "grid")
        drawing.text(2, y + 4, shorten(name, CLASS_NAME), "row", hint=name)
        for each in spreads:
            if (value := each.values[i][1]) is not None:
                hint = f"{each.label} on {name}: {formats.points(value)}"
                dot = marker(each.look.marker, x(value), y, class_=f"dot {each.look.colour}")
                drawing.add(dot, hint)
    title = f"Difference from {baseline} on each of {len(names)} classes"
    return drawing.svg(WIDTH, foot + 40, title)


def histograms(spreads: Sequence[Spread], *, baseline: str) -> Markup:
    """Draw one row per mixer: how many classes differ by how much, on one scale for all."""
    foot = 8 + _HISTOGRAM * len(spreads)
    drawing = Drawing()
    x = _differences(drawing, spreads, 8.0, foot, baseline)
    counted = [Counter(round(x(v) / BIN) for _, v in each.known()) for each in spreads]
    most = max(max(bins.values()) for bins in counted)
    for i, (each, bins) in enumerate(zip(spreads, counted, strict=True)):
        top, colour = 8 + _HISTOGRAM * i, each.look.colour
        row_label(drawing, top, each.look, each.label)
        base = number(top + _HISTOGRAM - 3)
        bars = "".join(
            f"M{number(BIN * place)} {base}v{number(-2 - 24 * n / most)}"
            for place, n in sorted(bins.items())
        )
        low, high = (f(each.known(), key=lambda pair: pair[1]) for f in (min, max))
        ends = [f"{formats.points(value)} on {name}" for name, value in (low, high)]
        hint = f"{each.label}: {' to '.join(ends)}"
        drawing.add(el("path", d=bars, class_=f"count {colour}"), hint)
    count = len(spreads[0].values)
    return drawing.svg(WIDTH, foot + 40, f"Differences from {baseline} on {count} classes")


def _differences(
    drawing: Drawing, spreads: Sequence[Spread], left: float, foot: float, baseline: str
) -> Scale:
    """Draw the axis of differences by class and return it."""
    values = [0.0, *(v for each in spreads for _, v in each.known())]
    x = Scale.around(values, left, WIDTH - 10, pad=0.06)
    at = [(value, f"{value * 100:g}") for value in ticks(x.low, x.high, 7)]
    title = f"difference from {shorten(baseline, 130)}, points"
    lower_axis(drawing, x, 4, foot, at, (x.middle, title))
    return x
