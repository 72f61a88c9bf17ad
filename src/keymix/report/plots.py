# SPDX-License-Identifier: Apache-2.0
"""The report's charts as inline SVG. Colours are CSS variables, so charts follow light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from keymix.report.labels import short_labels
from keymix.report.svg import (
    Box,
    Scale,
    canvas,
    el,
    marker,
    number,
    path,
    place_labels,
    shorten,
    text,
    text_width,
    ticks,
)
from keymix.task import FRACTION, Score

WIDTH, HEIGHT = 400.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 10.0, 12.0, 44.0
MARKERS = ("square", "diamond", "triangle", "down", "circle")
HUES = 8
TICK = 0.92
"""Width of a tick label over that of the same text in a label."""

LABEL = 150.0
"""Room for a label beside its point, px; longer ones lose their middle."""


@dataclass(frozen=True)
class Look:
    """How a mixer is drawn in every chart: its colour's class, its marker, its name there."""

    colour: str
    marker: str
    short: str


def looks(labels: Sequence[str], *, baseline: str, controls: Sequence[str] = ()) -> dict[str, Look]:
    """Give every mixer its colour and marker: the baseline in ink, controls in grey."""
    table: dict[str, Look] = {}
    short = short_labels(labels)
    hue = 0
    for label in labels:
        if label == baseline:
            table[label] = Look("ink", "circle", short[label])
        elif label in controls:
            table[label] = Look("ctl", "ring", short[label])
        else:
            table[label] = Look(f"c{hue % HUES}", MARKERS[hue % len(MARKERS)], short[label])
            hue += 1
    return table


@dataclass(frozen=True)
class Point:
    """One mixer in a chart of score and cost; `spread` is the standard deviation of y."""

    label: str
    look: Look
    x: float
    y: float
    spread: float | None = None


@dataclass(frozen=True)
class Line:
    """One mixer's curve with a band from low to high, where there is one."""

    label: str
    look: Look
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Row:
    """One mixer's difference from the baseline; the ends are (low, high) or ``None``."""

    label: str
    look: Look
    difference: float
    seeds: tuple[float, float] | None
    images: tuple[float, float] | None


def pareto(points: Sequence[Point], *, score: Score = FRACTION) -> list[Point]:
    """Return the points that no other beats in both cost (lower) and score (better)."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -score.rank(p.y))):
        if not front or score.ahead(point.y - front[-1].y):
            front.append(point)
    return front


def _percent(value: float, step: float) -> str:
    return f"{value * 100:.{_decimals(step * 100)}f}"


def _decimals(step: float) -> int:
    """Return how many decimals tell multiples of a step apart."""
    return next((d for d in range(6) if abs(round(step, d) - step) < 1e-9), 6)


def _tick_format(values: Sequence[float]) -> Callable[[float], str]:
    step = values[1] - values[0] if len(values) > 1 else 1.0
    decimals = _decimals(step)
    return lambda v: f"{v:.{decimals}f}"


def _writer(values: Sequence[float], *, percent: bool) -> Callable[[float], str]:
    """Return what writes the ticks of an axis."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    return (lambda value: _percent(value, step)) if percent else _tick_format(values)


def _rows(y: Scale, *, percent: bool) -> list[tuple[float, str]]:
    """Return the grid lines of a y axis and what stands at them."""
    values = ticks(y.low, y.high, 5)
    write = _writer(values, percent=percent)
    return [(value, write(value)) for value in values]


def _left(y: Scale, *, percent: bool) -> float:
    """Return where a chart begins, so that its tick labels keep clear of the axis title."""
    widest = max((text_width(label) for _, label in _rows(y, percent=percent)), default=0.0)
    return max(LEFT, 28 + TICK * widest)


def _frame(
    x: Scale,
    y: Scale,
    x_label: str,
    y_label: str,
    *,
    percent: bool,
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> list[Markup]:
    """Draw grid lines, tick labels and axis titles."""
    parts: list[Markup] = []
    for value, label in _rows(y, percent=percent):
        at = y(value)
        parts.append(el("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        parts.append(text(x.start - 6, at + 4, label, anchor="end", class_="tick"))
    if x_ticks is None:
        values = ticks(x.low, x.high, 5)
        write = _tick_format(values)
        x_ticks = [(value, write(value)) for value in values]
    for value, label in x_ticks:
        at = x(value)
        parts.append(el("line", x1=at, x2=at, y1=y.start, y2=y.start + 4, class_="axis"))
        parts.append(text(at, y.start + 17, label, anchor="middle", class_="tick"))
    parts.append(el("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"))
    middle = (x.start + x.end) / 2
    parts.append(text(middle, y.start + 36, x_label, anchor="middle", class_="title"))
    parts.append(
        el(
            "text",
            y_label,
            x=0,
            y=0,
            text_anchor="middle",
            class_="title",
            transform=f"translate(11 {number((y.start + y.end) / 2)}) rotate(-90)",
        )
    )
    return parts


def _along(steps: Sequence[tuple[float, float]]) -> list[Box]:
    """Return small boxes along a polyline, for labels to keep clear of."""
    boxes: list[Box] = []
    for (xa, ya), (xb, yb) in itertools.pairwise(steps):
        for i in range(1, 12):
            px, py = xa + (xb - xa) * i / 12, ya + (yb - ya) * i / 12
            boxes.append((px - 3, py - 2, px + 3, py + 2))
    return boxes


def _stragglers(values: Sequence[float], removable: Sequence[bool], score: Score) -> set[int]:
    """Return removable values so much worse than the others that they would squash the axis."""
    kept = [score.rank(v) for v, gone in zip(values, removable, strict=True) if not gone]
    if not kept:
        return set()
    low, high = min(kept), max(kept)
    room = max(high - low, _point(score, kept)) * 2
    return {i for i, v in enumerate(values) if removable[i] and score.rank(v) < low - room}


def _point(score: Score, values: Sequence[float]) -> float:
    """Return a difference that is small: a point of a fraction, else a hundredth of the values."""
    return 0.01 if score.unit == "%" else 0.01 * max(map(abs, values), default=0.0)


def scatter(
    points: Sequence[Point], *, x_label: str, y_label: str, name: str, score: Score = FRACTION
) -> Markup:
    """Draw a score against a cost, with the Pareto front and every point named.

    A control far worse than the rest would squash the axis: it is drawn as an arrow at the edge of
    the chart with its value next to its name.

    Args:
        points: One a mixer.
        x_label: The cost and its unit.
        y_label: The score and its unit.
        name: What the chart shows, for readers who cannot see it.
        score: What y is.
    """
    percent = score.unit == "%"
    outside = _stragglers([p.y for p in points], [p.look.colour == "ctl" for p in points], score)
    inside = [p for i, p in enumerate(points) if i not in outside]
    reach = [e for p in inside for e in (p.y - (p.spread or 0), p.y + (p.spread or 0))]
    y = Scale.around(reach, HEIGHT - BOTTOM, TOP, pad=0.3 if outside else 0.12)
    left = _left(y, percent=percent)
    x = Scale.around([p.x for p in points], left, WIDTH - RIGHT, pad=0.12)
    parts = _frame(x, y, x_label, y_label, percent=percent)
    # the arrow at the edge stands for a point beyond it, in the front too; it points up where less
    # is better
    edge, inward = (y.start, -1) if score.better == "more" else (y.end, 1)
    marks = [(x(p.x), edge + 9 * inward if i in outside else y(p.y)) for i, p in enumerate(points)]
    steps = [marks[points.index(p)] for p in pareto(points, score=score)]
    if len(steps) > 1:
        parts.append(el("path", d=path(steps), class_="front"))
    bars = _along(steps)
    labels: list[str] = []
    for i, p in enumerate(points):
        px, py = marks[i]
        short = shorten(p.look.short, LABEL)
        value = f"{score.digits(p.y)} {score.unit}".rstrip()
        labels.append(f"{short} ({value})" if i in outside else short)
        if i in outside:
            tip = [
                (px - 4, edge + 7 * inward),
                (px, edge + 2 * inward),
                (px + 4, edge + 7 * inward),
            ]
            tail = f"M{number(px)} {number(edge + 14 * inward)}V{number(edge + 3 * inward)}"
            parts.append(
                el(
                    "path",
                    d=f"{tail}{path(tip)}",
                    class_=f"bar {p.look.colour}",
                )
            )
            continue
        if p.spread:
            top, foot = y(p.y + p.spread), y(p.y - p.spread)
            parts.append(el("line", x1=px, x2=px, y1=top, y2=foot, class_=f"bar {p.look.colour}"))
            bars.append((px - 2, top, px + 2, foot))
        hint = el("title", f"{p.label}: {score.digits(p.y, 2)} {score.unit}".rstrip())
        parts.append(el("g", hint, marker(p.look.marker, px, py, class_=f"dot {p.look.colour}")))
    frame = (left + 2, TOP - 8, WIDTH - 2, y.start)
    for (px, py), label, spot, p in zip(
        marks, labels, place_labels(marks, labels, frame, bars), points, strict=True
    ):
        if spot.leader:
            parts.append(
                el("line", x1=px, y1=py, x2=spot.x, y2=spot.y - 4, class_=f"leader {p.look.colour}")
            )
        parts.append(
            text(spot.x, spot.y, label, anchor=spot.anchor, class_=f"label t-{p.look.colour}")
        )
    return canvas(WIDTH, HEIGHT, name, *parts)


def curves(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    name: str,
    percent: bool = False,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    markers: bool = False,
    holds: Sequence[float] = (),
) -> Markup:
    """Draw one curve a mixer, each with its band.

    Args:
        lines: The curves.
        x_label: What x counts.
        y_label: What y is, with its unit.
        name: What the chart shows, for readers who cannot see it.
        percent: Values are fractions, shown in percent.
        x_ticks: Positions and names on the x axis; round numbers by default.
        markers: Draw the points too (few points a line).
        holds: Values that the y axis reaches, whatever the curves do; at 0 it begins where no value
            is below.
    """
    xs = [v for line in lines for v in line.xs]
    ys = [v for line in lines for part in (line.ys, line.low or (), line.high or ()) for v in part]
    x_low, x_high = min(xs), max(xs)
    room = 0.08 * (x_high - x_low) if markers else 0.0
    if x_high == x_low:
        room = 0.5
    y = Scale.around([*ys, *holds], HEIGHT - BOTTOM, TOP, pad=0.06)
    if 0.0 in holds and min(ys) >= 0:
        y = replace(y, low=0.0)
    x = Scale(x_low - room, x_high + room, _left(y, percent=percent), WIDTH - RIGHT)
    if x_ticks is None:
        x_ticks = [(v, f"{v:.0f}") for v in ticks(x_low, x_high, 6) if v == round(v)]
    parts = _frame(x, y, x_label, y_label, percent=percent, x_ticks=x_ticks)
    for line in lines:
        if line.low is not None and line.high is not None and len(line.xs) > 1:
            upper = [(x(a), y(b)) for a, b in zip(line.xs, line.high, strict=True)]
            lower = [(x(a), y(b)) for a, b in zip(line.xs, line.low, strict=True)]
            parts.append(
                el(
                    "path",
                    d=path(upper + lower[::-1], close=True),
                    class_=f"band {line.look.colour}",
                )
            )
    for line in lines:
        at = [(x(a), y(b)) for a, b in zip(line.xs, line.ys, strict=True)]
        hint = el("title", line.label)
        parts.append(el("path", hint, d=path(at), class_=f"curve {line.look.colour}"))
        if markers or len(at) == 1:
            parts += [
                marker(line.look.marker, *spot, class_=f"dot {line.look.colour}", size=3.5)
                for spot in at
            ]
    return canvas(WIDTH, HEIGHT, name, *parts)


def forest(
    rows: Sequence[Row],
    *,
    baseline: str,
    name: str,
    score: Score = FRACTION,
    units: str = "images",
) -> Markup:
    """Draw every difference from the baseline with its interval over seeds and over units.

    A control whose difference would squash the axis is drawn at the edge, its value in the text.

    Args:
        rows: One a mixer other than the baseline.
        baseline: Its label.
        name: What the chart shows, for readers who cannot see it.
        score: What the differences are of.
        units: What the second interval is over.
    """
    row_height, top = 46.0, 6.0
    height = top + row_height * len(rows) + 42
    far = _stragglers(
        [r.difference for r in rows] + [0.0],
        [r.look.colour == "ctl" for r in rows] + [False],
        score,
    )
    inside = [row for i, row in enumerate(rows) if i not in far]
    # Intervals over two or three seeds are so wide that they would hide the rest: they go on
    # beyond the axis, with an arrow.
    differences = [r.difference for r in inside]
    limit = max([2 * _point(score, differences), *(3 * abs(d) for d in differences)])
    limit = max([limit, *(abs(e) for r in inside for e in r.images or ())])
    ends = [0.0, *(e for r in inside for e in (r.difference, *(r.seeds or ()), *(r.images or ())))]
    ends = [max(-limit, min(limit, e)) for e in ends]
    x = Scale.around(ends, 8.0, WIDTH - 8.0, pad=0.06)
    far = {i for i in far if not x.low <= rows[i].difference <= x.high}
    foot = top + row_height * len(rows)
    parts: list[Markup] = []
    values = ticks(x.low, x.high, 6)
    write = _writer(values, percent=score.unit == "%")
    for value in values:
        kind = "zero" if abs(value) < 1e-12 else "grid"
        parts.append(el("line", x1=x(value), x2=x(value), y1=top, y2=foot, class_=kind))
        label = write(value).replace("-", "−")
        parts.append(text(x(value), foot + 15, label, anchor="middle", class_="tick"))
    parts.append(
        text(
            WIDTH / 2,
            foot + 33,
            ", ".join(filter(None, (f"difference from {shorten(baseline, 190)}", _unit_of(score)))),
            anchor="middle",
            class_="title",
        )
    )
    for i, row in enumerate(rows):
        parts += _forest_row(row, x, top + i * row_height, score, units, outside=i in far)
    return canvas(WIDTH, height, name, *parts)


def _unit_of(score: Score) -> str:
    """What stands behind the title of an axis of differences: the unit, and which way is better."""
    unit = "percentage points" if score.unit == "%" else score.unit
    return ", ".join(filter(None, (unit, "less is better" if score.better == "less" else "")))


def _forest_row(
    row: Row, x: Scale, y: float, score: Score, units: str, *, outside: bool
) -> list[Markup]:
    colour = row.look.colour
    label = row.look.short
    parts = [
        el("rect", x=8, y=y + 2, width=text_width(label) + 4, height=14, class_="ground"),
        el("rect", x=WIDTH - 46, y=y + 2, width=40, height=14, class_="ground"),
        el("g", el("title", row.label), text(8, y + 13, label, class_=f"label t-{colour}")),
        text(WIDTH - 8, y + 13, score.change(row.difference), anchor="end", class_="label num"),
    ]
    if outside:
        left = row.difference < 0
        at, inward = (x.start, 1) if left else (x.end, -1)
        arrow = [(at + 7 * inward, y + 23), (at, y + 28), (at + 7 * inward, y + 33)]
        parts.append(el("path", d=path(arrow), class_=f"bar {colour}"))
        anchor = "start" if left else "end"
        told = text(at + 13 * inward, y + 32, "outside the axis", anchor=anchor, class_="tick")
        parts.append(told)
        return parts

    def clip(v: float) -> float:
        return max(x.start, min(x.end, x(v)))

    for ends, dy, kind in ((row.seeds, 24.0, "seeds"), (row.images, 34.0, units)):
        at_y = y + dy
        if ends is not None:
            a, b = clip(ends[0]), clip(ends[1])
            low, high = (
                f"{100 * end:+.2f}" if score.unit == "%" else score.change(end) for end in ends
            )
            hint = el("title", f"{row.label}, over {kind}: {low} to {high}")
            line = "seeds" if kind == "seeds" else "images"
            parts.append(
                el("g", hint, el("line", x1=a, x2=b, y1=at_y, y2=at_y, class_=f"{line} {colour}"))
            )
            for end, edge in ((ends[0], x.start), (ends[1], x.end)):
                if abs(clip(end) - x(end)) > 0.5:  # goes on beyond the axis
                    inward = 5 if edge == x.start else -5
                    tip = [(edge + inward, at_y - 4), (edge, at_y), (edge + inward, at_y + 4)]
                    parts.append(el("path", d=path(tip), class_=f"bar {colour}"))
        parts.append(marker("circle", clip(row.difference), at_y, class_=f"dot {colour}", size=3.5))
    return parts
