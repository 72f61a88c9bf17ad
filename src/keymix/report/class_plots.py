# SPDX-License-Identifier: Apache-2.0
"""Charts of differences by class: a dot a mixer where classes are few, else a histogram each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from keymix.report.formats import points
from keymix.report.plots import WIDTH, Look
from keymix.report.svg import Scale, canvas, el, marker, number, shorten, text, text_width, ticks

NAME = 118.0
"""Room for a class's name, px."""

ROW, HISTOGRAM, FOOT = 22.0, 46.0, 40.0

FEW = 20
"""Up to so many classes each has a row of its own."""

BIN = 4.0
"""Width of a histogram's bar, px."""


@dataclass(frozen=True)
class Spread:
    """One mixer's difference from the baseline on each class, in the order of the chart.

    Every spread of a chart names the same classes; ``None`` stands for a class without images.
    """

    label: str
    look: Look
    values: Sequence[tuple[str, float | None]]

    def known(self) -> list[tuple[str, float]]:
        """Return the classes that have a difference."""
        return [(name, value) for name, value in self.values if value is not None]


def draw(spreads: Sequence[Spread], *, baseline: str) -> Markup:
    """Draw `dots` of few classes, `histograms` of many.

    Args:
        spreads: One a mixer.
        baseline: The label that the differences are from.
    """
    few = len(spreads[0].values) <= FEW
    return (dots if few else histograms)(spreads, baseline=baseline)


def dots(spreads: Sequence[Spread], *, baseline: str) -> Markup:
    """Draw a row a class with a dot a mixer.

    Args:
        spreads: One a mixer.
        baseline: The label that the differences are from.
    """
    names = [name for name, _ in spreads[0].values]
    left = 14 + min(NAME, max(text_width(name) for name in names))
    height = 8 + ROW * len(names)
    x = _scale(spreads, left)
    parts = _ground(x, height, baseline)
    for i, name in enumerate(names):
        at = 8 + ROW * (i + 0.5)
        parts.append(el("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        parts.append(el("g", el("title", name), text(2, at + 4, shorten(name, NAME), class_="row")))
        for spread in spreads:
            value = spread.values[i][1]
            if value is None:
                continue
            hint = el("title", f"{spread.label} on {name}: {points(value)}")
            dot = marker(spread.look.marker, x(value), at, class_=f"dot {spread.look.colour}")
            parts.append(el("g", hint, dot))
    told = f"Difference from {baseline} on each of {len(names)} classes"
    return canvas(WIDTH, height + FOOT, told, *parts)


def histograms(spreads: Sequence[Spread], *, baseline: str) -> Markup:
    """Draw a row a mixer: how many classes differ by how much, on one scale for all.

    Args:
        spreads: One a mixer.
        baseline: The label that the differences are from.
    """
    height = 8 + HISTOGRAM * len(spreads)
    x = _scale(spreads, 8.0)
    parts = _ground(x, height, baseline)
    counted = [Counter(round(x(v) / BIN) for _, v in spread.known()) for spread in spreads]
    most = max(max(bins.values()) for bins in counted)
    for i, (spread, bins) in enumerate(zip(spreads, counted, strict=True)):
        top, colour = 8 + HISTOGRAM * i, spread.look.colour
        label = spread.look.short
        parts.append(
            el("rect", x=8, y=top + 2, width=text_width(label) + 4, height=14, class_="ground")
        )
        hint = el("title", spread.label)
        parts.append(el("g", hint, text(8, top + 13, label, class_=f"label t-{colour}")))
        foot = number(top + HISTOGRAM - 3)
        bars = "".join(
            f"M{number(BIN * place)} {foot}v{number(-2 - 24 * n / most)}"
            for place, n in sorted(bins.items())
        )
        low, high = (f(spread.known(), key=lambda pair: pair[1]) for f in (min, max))
        ends = f"{spread.label}: {points(low[1])} on {low[0]} to {points(high[1])} on {high[0]}"
        parts.append(el("g", el("title", ends), el("path", d=bars, class_=f"count {colour}")))
    count = len(spreads[0].values)
    return canvas(WIDTH, height + FOOT, f"Differences from {baseline} on {count} classes", *parts)


def _scale(spreads: Sequence[Spread], left: float) -> Scale:
    values = [0.0, *(v for spread in spreads for _, v in spread.known())]
    return Scale.around(values, left, WIDTH - 10, pad=0.06)


def _ground(x: Scale, height: float, baseline: str) -> list[Markup]:
    """Draw the vertical lines, their values below, and what the axis is."""
    parts = []
    for value in ticks(x.low, x.high, 7):
        kind = "zero" if abs(value) < 1e-12 else "grid"
        parts.append(el("line", x1=x(value), x2=x(value), y1=4, y2=height, class_=kind))
        label = f"{value * 100:g}".replace("-", "−")
        parts.append(text(x(value), height + 15, label, anchor="middle", class_="tick"))
    title = f"difference from {shorten(baseline, 130)}, points"
    middle = (x.start + x.end) / 2
    parts.append(text(middle, height + 33, title, anchor="middle", class_="title"))
    return parts
