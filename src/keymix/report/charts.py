# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG of a few marks: points, lines, bars, intervals, squares and rasters.

Marks are placed by a `Scale` on each axis and added to a `Drawing`. Colours are CSS variables, so
charts follow the page into the dark; `as_file` makes a chart a file of its own.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

from keymix.report.labels import (
    Box,
    place_labels,
    short_labels,
    shorten,
    spread,
    text_width,
)
from keymix.report.page import environment
from keymix.report.svg import (
    LEFT,
    Drawing,
    Scale,
    Ticks,
    draw_frame,
    el,
    left_of,
    log_ticks,
    marker,
    number,
    path,
    ticks,
    whole_ticks,
    written,
    y_ticks,
)
from keymix.task import FRACTION, Score

WIDTH, HEIGHT = 400.0, 280.0
RIGHT, TOP, BOTTOM = 10.0, 12.0, 44.0
MARKERS = ("plus", "diamond", "triangle", "down", "star", "cross", "hexagon", "bar")
"""One for each hue; the baseline has the circle, controls the ring, references the square."""
HUES = 8
LABEL = 150.0
"""Room for a label next to its point, px; longer ones lose their middle."""


# ---- how mixers look ------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a mixer is drawn in every chart: its colour's class, its marker, its name there."""

    colour: str
    marker: str
    short: str

    @property
    def key(self) -> Markup:
        """Its line and marker, for a legend."""
        line = el("path", d="M0 6H28", class_=f"curve {self.colour}")
        dot = marker(self.marker, 14.0, 6.0, class_=f"dot {self.colour}")
        return el("svg", line, dot, viewBox="0 0 28 12", class_="key", aria_hidden="true")

    @property
    def neutral(self) -> bool:
        """Whether it is a control's or a reference's, which may be far from the mixers."""
        return self.colour in ("ctl", "ref")


def looks(
    labels: Sequence[str],
    *,
    baseline: str = "",
    controls: Sequence[str] = (),
    references: Sequence[str] = (),
    mixers: Mapping[str, str] | None = None,
) -> dict[str, Look]:
    """Give every mixer its colour and marker: the baseline in ink, controls in grey.

    Trained references are in brown.

    A name has its colour wherever it is drawn, unless another of the labels took it before. Labels
    of models have the colours of their `mixers`, where those are known.
    """
    table: dict[str, Look] = {}
    short = short_labels(labels)
    taken: set[int] = set()
    for label in labels:
        if label == baseline:
            table[label] = Look("ink", "circle", short[label])
        elif label in controls:
            table[label] = Look("ctl", "ring", short[label])
        elif label in references:
            table[label] = Look("ref", "square", short[label])
        else:
            own = (mixers or {}).get(label, label).partition("(")[0]
            first = zlib.crc32(own.encode()) % HUES
            free = ((first + i) % HUES for i in range(HUES))
            hue = next((hue for hue in free if hue not in taken), first)
            taken.add(hue)
            table[label] = Look(f"c{hue}", MARKERS[hue], short[label])
    return table


@dataclass(frozen=True)
class Chart:
    """A drawn chart with part of its file's name, and what it shows in a sentence."""

    key: str
    svg: Markup
    caption: str


# ---- points ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One mixer in a chart of score and cost; `spread` is the standard deviation of y."""

    label: str
    look: Look
    x: float
    y: float
    spread: float | None = None


def pareto(points: Sequence[Point], *, score: Score = FRACTION) -> list[Point]:
    """Return the points that no other beats in both cost (lower) and score (better)."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -score.rank(p.y))):
        if not front or score.ahead(point.y - front[-1].y):
            front.append(point)
    return front


def _along(steps: Sequence[tuple[float, float]]) -> list[Box]:
    """Return small boxes along a polyline, for labels to keep clear of."""
    between = [
        (xa + (xb - xa) * i / 12, ya + (yb - ya) * i / 12)
        for (xa, ya), (xb, yb) in itertools.pairwise(steps)
        for i in range(1, 12)
    ]
    return [(px - 3, py - 2, px + 3, py + 2) for px, py in between]


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
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    name: str,
    score: Score = FRACTION,
    levels: Mapping[str, float] | None = None,
    baseline: str = "",
) -> Markup:
    """Draw a score against a cost, with the Pareto front and every point named.

    What is better and cheaper than the `baseline` is shaded.

    A control far worse than the rest would squash the axis: it is drawn as an arrow at the edge of
    the chart with its value next to its name, and of the `levels`, lines across the chart by what
    they are, those far off are left out. `name` is for readers who cannot see it.
    """
    percent = score.unit == "%"
    outside = _stragglers([p.y for p in points], [p.look.neutral for p in points], score)
    inside = [p for i, p in enumerate(points) if i not in outside]
    reach = [e for p in inside for e in (p.y - (p.spread or 0), p.y + (p.spread or 0))]
    room = max(max(reach) - min(reach), _point(score, reach))
    ends = min(reach) - room, max(reach) + room
    near = {what: v for what, v in (levels or {}).items() if ends[0] <= v <= ends[1]}
    reach += near.values()
    pad = 0.3 if outside else 0.12
    y = Scale.around(reach, HEIGHT - BOTTOM, TOP, pad=pad, within=(score.low, score.high))
    left = left_of(y, percent=percent)
    x = Scale.around([p.x for p in points], left, WIDTH - RIGHT, pad=0.12)
    drawing = Drawing()
    x_ticks = written(ticks(x.low, x.high, 5))
    draw_frame(drawing, x, y, (x_label, y_label), (x_ticks, y_ticks(y, percent=percent)))
    base = next((p for p in inside if p.label == baseline), None)
    if base is not None:
        across, level = x(base.x), y(base.y)
        top, foot = (TOP, level) if score.better == "more" else (level, y.start)
        drawing.box(left, top, max(0.0, across - left), max(0.0, foot - top), "better")
    named = _draw_levels(drawing, near, y, left)
    # an arrow at the edge marks a point beyond it; it points up where less is better
    edge, inward = (y.start, -1) if score.better == "more" else (y.end, 1)
    marks = [(x(p.x), edge + 9 * inward if i in outside else y(p.y)) for i, p in enumerate(points)]
    steps = [marks[points.index(p)] for p in pareto(points, score=score)]
    if len(steps) > 1:
        drawing.add(el("path", d=path(steps), class_="front"))
    bars = [*_along(steps), *named]
    labels: list[str] = []
    for i, (p, (px, py)) in enumerate(zip(points, marks, strict=True)):
        short, bar = shorten(p.look.short, LABEL), f"bar {p.look.colour}"
        if i in outside:
            labels.append(f"{short} ({score.digits(p.y)} {score.unit}".rstrip() + ")")
            root, tip = edge + 7 * inward, edge + 2 * inward
            tail = f"M{number(px)} {number(edge + 14 * inward)}V{number(edge + 3 * inward)}"
            head = path([(px - 4, root), (px, tip), (px + 4, root)])
            drawing.add(el("path", d=tail + head, class_=bar))
            continue
        labels.append(short)
        if p.spread:
            top, foot = (y(max(y.low, min(y.high, p.y + s))) for s in (p.spread, -p.spread))
            drawing.line((px, px), (top, foot), bar)
            bars.append((px - 2, top, px + 2, foot))
        hint = f"{p.label}: {score.digits(p.y, 2)} {score.unit}".rstrip()
        drawing.add(marker(p.look.marker, px, py, class_=f"dot {p.look.colour}"), hint)
    frame = (left + 2, TOP - 8, WIDTH - 2, y.start)
    spots = place_labels(marks, labels, frame, bars)
    for (px, py), label, spot, p in zip(marks, labels, spots, points, strict=True):
        if spot.leader:
            drawing.line((px, spot.x), (py, spot.y - 4), f"leader {p.look.colour}")
        drawing.text(spot.x, spot.y, label, f"label t-{p.look.colour}", spot.anchor)
    return drawing.svg(WIDTH, HEIGHT, name)


def _draw_levels(
    drawing: Drawing,
    levels: Mapping[str, float],
    y: Scale,
    left: float,
    *,
    anchor: str = "start",
) -> list[Box]:
    """Draw lines across a chart, each with what it is at one end; return where their names are.

    Lines that are near each other have their names together, over the upper one.
    """
    right, boxes = WIDTH - 2, []
    groups: list[tuple[float, list[str]]] = []
    for what, value in sorted(levels.items(), key=lambda each: y(each[1])):
        drawing.line((left, right), (y(value), y(value)), "leader ctl")
        if groups and y(value) - groups[-1][0] < _GAP:
            groups[-1][1].append(what)
        else:
            groups.append((y(value), [what]))
    for height, names in groups:
        text, at = ", ".join(names), left + 4 if anchor == "start" else right - 4
        drawing.text(at, height - 4, text, "tick", anchor)
        begin = at if anchor == "start" else at - text_width(text)
        boxes.append((begin, height - 13, begin + text_width(text), height - 1))
    return boxes


# ---- lines ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One mixer's curve with a band from low to high, where there is one."""

    label: str
    look: Look
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def _curve(
    drawing: Drawing,
    line: Line,
    at: Sequence[tuple[float, float]],
    *,
    marked: bool,
    size: float = 3.5,
) -> None:
    """Draw a curve through pixels, with its points if it is marked or has one alone."""
    colour = line.look.colour
    drawing.add(el("path", el("title", line.label), d=path(at), class_=f"curve {colour}"))
    if marked or len(at) == 1:
        for spot in at:
            drawing.add(marker(line.look.marker, *spot, class_=f"dot {colour}", size=size))


def curves(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    name: str,
    percent: bool = False,
    x_ticks: Ticks | None = None,
    markers: bool = False,
    holds: Sequence[float] = (),
    levels: Mapping[str, float] | None = None,
    within: tuple[float | None, float | None] = (None, None),
) -> Markup:
    """Draw one curve per mixer, each with its band, and `levels`: lines across by what they are.

    With `percent`, values are fractions, shown in percent; `x_ticks` are round numbers by default;
    `markers` draws the points too. The y axis reaches the values that it `holds`, whatever the
    curves do, and none beyond the bounds `within` which values can be; at 0 it begins where no
    value is below. `name` is for those who cannot see it.
    """
    xs = [v for line in lines for v in line.xs]
    ys = [v for line in lines for part in (line.ys, line.low or (), line.high or ()) for v in part]
    x_low, x_high = min(xs), max(xs)
    room = 0.08 * (x_high - x_low) if markers else 0.0
    if x_high == x_low:
        room = 0.5
    held = [*ys, *holds, *(levels or {}).values()]
    y = Scale.around(held, HEIGHT - BOTTOM, TOP, pad=0.06, within=within)
    if 0.0 in holds and min(ys) >= 0:
        y = replace(y, low=0.0)
    x = Scale(x_low - room, x_high + room, left_of(y, percent=percent), WIDTH - RIGHT)
    if x_ticks is None:
        x_ticks = [(v, f"{v:.0f}") for v in whole_ticks(x_low, x_high)]
    drawing = Drawing()
    draw_frame(drawing, x, y, (x_label, y_label), (x_ticks, y_ticks(y, percent=percent)))
    _draw_levels(drawing, levels or {}, y, x.start, anchor="end")  # where curves begin it is full
    for line in lines:
        if line.low is not None and line.high is not None and len(line.xs) > 1:
            upper = [(x(a), y(min(b, y.high))) for a, b in zip(line.xs, line.high, strict=True)]
            lower = [(x(a), y(max(b, y.low))) for a, b in zip(line.xs, line.low, strict=True)]
            band = path(upper + lower[::-1], close=True)
            drawing.add(el("path", d=band, class_=f"band {line.look.colour}"))
    for line in lines:
        at = [(x(a), y(b)) for a, b in zip(line.xs, line.ys, strict=True)]
        _curve(drawing, line, at, marked=markers)
    return drawing.svg(WIDTH, HEIGHT, name)


LOG_HEIGHT = 300.0
NAME = 128.0
"""Room for a name at the end of a curve, px; longer ones lose their middle."""

DEPTH = 10.0
"""A control's curve may go this factor below all others before it leaves the chart."""

_GAP, _REACH, _PAD = 12.5, 18.0, 1.25
_APART = 34.0  # least distance of two numbers on the x axis, px


def floor(lines: Sequence[Line]) -> float:
    """Return the least value that the chart contains: controls may be below it, others not."""
    values = [y for line in lines for y in line.ys if y > 0]
    kept = [y for line in lines if not line.look.neutral for y in line.ys if y > 0]
    return max(min(values), min(kept) / DEPTH) if kept else min(values)


def outside(lines: Sequence[Line]) -> list[Line]:
    """List the curves of which the chart shows nothing, since they are below it."""
    low = floor(lines)
    return [line for line in lines if all(y < low for y in line.ys)]


def log_curves(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    name: str,
    marked: Collection[str] = (),
) -> Markup:
    """Draw curves with both axes logarithmic, each named at its right end.

    Points at 0 or below are left out; some value is above 0. The points of the `marked` labels are
    drawn too.
    """
    low = floor(lines)
    below = outside(lines)
    shown = [line for line in lines if line not in below]
    labels = [shorten(line.look.short, NAME) for line in shown]
    right = WIDTH - _REACH - max(text_width(label) for label in labels)
    xs = sorted({x for line in shown for x in line.xs})
    top = max(y for line in shown for y in line.ys)
    x = Scale(xs[0], xs[-1], LEFT, right, log=True)
    y = Scale(low / _PAD, top * _PAD, LOG_HEIGHT - BOTTOM, TOP, log=True)
    drawing = Drawing()
    y_ticks = [(value, _shortened(value)) for value in log_ticks(y.low, y.high)]
    at_x = xs if len(xs) != 2 else log_ticks(*xs)
    draw_frame(drawing, x, y, (x_label, y_label), (_with_room(x, at_x), y_ticks))
    ends: list[tuple[float, float]] = []
    for line in shown:
        at = [(x(a), y(b)) for a, b in zip(line.xs, line.ys, strict=True) if b >= low]
        ends.append(at[-1])
        _curve(drawing, line, at, marked=line.label in marked, size=3.2)
    places = spread([py for _, py in ends], _GAP, TOP, LOG_HEIGHT - BOTTOM)
    for line, label, (px, py), place in zip(shown, labels, ends, places, strict=True):
        colour, start = line.look.colour, right + _REACH - 4
        drawing.line((px + 4, start), (py, place), f"leader {colour}")
        drawing.text(start + 3, place + 4, label, f"label t-{colour}", hint=line.label)
    return drawing.svg(WIDTH, LOG_HEIGHT, name)


def _with_room(x: Scale, values: Sequence[float]) -> list[tuple[float, str]]:
    """Write values on an axis, leaving out what would run into the one before."""
    written, last = [], -_APART
    for value in values:
        room = x(value) - last >= _APART
        last = x(value) if room else last
        written.append((value, f"{value:,.10g}" if room else ""))
    return written


def _shortened(value: float) -> str:
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= 10 * size:
            return f"{value / size:,.10g}{unit}"
    return f"{value:,.10g}"


# ---- intervals ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One mixer's difference from the baseline; the ends are (low, high) or ``None``."""

    label: str
    look: Look
    difference: float
    both: tuple[float, float] | None  # over seeds and test units
    images: tuple[float, float] | None
    by_seed: Sequence[float] = ()


STRIP_WIDTH, STRIP_HEIGHT = 260.0, 26.0


@dataclass(frozen=True)
class Strips:
    """Differences from the baseline on one axis, a strip for each mixer, and the axis's ends."""

    drawn: Mapping[str, Markup]
    low: float
    high: float


def strips(rows: Sequence[Row], *, score: Score = FRACTION, units: str = "images") -> Strips:
    """Draw every difference from the baseline on one axis: both intervals, a dot for each seed.

    The broad line is over the `units` of the test split, the thin one over seeds and units. What
    lies beyond the axis gets an arrow: intervals over few seeds, and a control that would squash
    the rest.
    """
    differences = [row.difference for row in rows]
    far = _stragglers([*differences, 0.0], [*(row.look.neutral for row in rows), False], score)
    inside = [row for i, row in enumerate(rows) if i not in far]
    near = [row.difference for row in inside]
    limit = max(
        [2 * _point(score, near), *(3 * abs(d) for d in near)]
        + [abs(end) for row in inside for end in row.images or ()]
    )
    ends = [
        end
        for row in inside
        for end in (row.difference, *row.by_seed, *(row.both or ()), *(row.images or ()))
    ]
    ends = [max(-limit, min(limit, end)) for end in (0.0, *ends)]
    if min(ends) == max(ends):
        ends += [-limit, limit]
    most = None if score.low is None or score.high is None else score.high - score.low
    within = (None, None) if most is None else (-most, most)
    x = Scale.around(ends, 6.0, STRIP_WIDTH - 6.0, pad=0.06, within=within)
    drawn = {row.label: _strip(row, x, score, units) for row in rows}
    return Strips(drawn=drawn, low=x.low, high=x.high)


def _strip(row: Row, x: Scale, score: Score, units: str) -> Markup:
    """Draw one mixer's strip."""
    drawing, colour, y = Drawing(), row.look.colour, STRIP_HEIGHT / 2
    drawing.line((x(0.0), x(0.0)), (1, STRIP_HEIGHT - 1), "zero")
    said = [f"{row.label}: {score.changed(row.difference)}"]
    for interval, kind, over in (
        (row.images, "images", units),
        (row.both, "seeds", f"seeds and {units}"),
    ):
        if interval is not None:
            low, high = (score.change(end) for end in interval)
            said.append(f"over {over} {low} to {high}")
            _interval(drawing, x, y, interval, (kind, colour), said[-1])
    for value in row.by_seed:
        if x.low <= value <= x.high:
            drawing.add(marker("circle", x(value), y, class_=f"dot {colour} seed", size=2.6))
    if x.low <= row.difference <= x.high:
        drawing.line((x(row.difference),) * 2, (y - 7, y + 7), f"seeds {colour}")
    else:
        edge, inward = (x.start, 1) if row.difference < x.low else (x.end, -1)
        _arrow(drawing, (edge, y), (7 * inward, 5), colour)
    return drawing.svg(STRIP_WIDTH, STRIP_HEIGHT, "; ".join(said))


def _clipped(x: Scale, value: float) -> float:
    return max(x.start, min(x.end, x(value)))


def _interval(
    drawing: Drawing,
    x: Scale,
    y: float,
    ends: tuple[float, float],
    kind: tuple[str, str],
    hint: str,
) -> None:
    """Draw an interval, with an arrow where it continues beyond the axis."""
    low, high = (_clipped(x, end) for end in ends)
    drawing.line((low, high), (y, y), " ".join(kind), hint)
    for end, edge, inward in ((ends[0], x.start, 5), (ends[1], x.end, -5)):
        if abs(_clipped(x, end) - x(end)) > 0.5:
            _arrow(drawing, (edge, y), (inward, 4), kind[1])


def _arrow(
    drawing: Drawing, tip: tuple[float, float], size: tuple[float, float], colour: str
) -> None:
    """Draw the head of an arrow to the side, so long and half as high."""
    (x, y), (length, half) = tip, size
    points = [(x + length, y - half), tip, (x + length, y + half)]
    drawing.add(el("path", d=path(points), class_=f"bar {colour}"))


def row_label(drawing: Drawing, top: float, look: Look, label: str) -> None:
    """Name a mixer at the left of its row, over the grid."""
    drawing.box(8, top + 2, text_width(look.short) + 4, 14, "ground")
    drawing.text(8, top + 13, look.short, f"label t-{look.colour}", hint=label)


# ---- squares --------------------------------------------------------------------------------

SIDE = 300.0
_MOST_NAMES, _MOST_NUMBERS = 8, 8  # of a matrix, on its sides and in rows of cells

Matrix = Sequence[Sequence[float | None]]


def heat_map(
    values: Matrix,
    *,
    names: Sequence[str],
    label: str,
    name: str,
    high: float = 1.0,
    signed: bool = False,
    numbers: bool = False,
) -> Markup:
    """Draw a square matrix, the more opaque the larger the number; None is a hole.

    `names` are those of rows and columns alike, `label` what these are. The number `high` is
    opaque; if `signed`, its negative is too, in another colour, else what is below 0 is drawn as 0.
    `numbers` are written into the cells, unless there are too many.
    """
    left, top = 46.0, 8.0
    count = len(values)
    cell = SIDE / count
    drawing = Drawing()
    for (i, row), j in itertools.product(enumerate(values), range(count)):
        at = (left + j * cell, top + i * cell, cell, cell)
        if (value := row[j]) is None:
            drawing.box(*at, "hole")
            continue
        _square(drawing, at, min(abs(value) / high, 1.0) if signed or value > 0 else 0.0, value)
        if numbers and count <= _MOST_NUMBERS:
            text = f"{value:.2f}".replace("-", "−")
            drawing.text(at[0] + cell / 2, at[1] + cell / 2 + 3, text, "inside", "middle")
    drawing.box(left, top, SIDE, SIDE, "edge")
    for i in range(0, count, -(-count // _MOST_NAMES)):
        middle = (i + 0.5) * cell
        drawing.text(left + middle, top + SIDE + 16, names[i], "tick", "middle")
        drawing.text(left - 6, top + middle + 4, names[i], "tick", "end")
    drawing.text(left + SIDE / 2, top + SIDE + 36, label, "title", "middle")
    drawing.rising(top + SIDE / 2, label)
    # the scale of colours
    steps, bar, lowest = 10, left + SIDE + 16, -high if signed else 0.0
    size = SIDE / steps
    for i in range(steps):
        value = lowest + (high - lowest) * (i + 0.5) / steps
        at = (bar, top + SIDE - (i + 1) * size, 12.0, size)
        _square(drawing, at, abs(value) / high, value)
    drawing.box(bar, top, 12.0, SIDE, "edge")
    for value in (lowest, (lowest + high) / 2, high):
        y = top + SIDE * (high - value) / (high - lowest)
        drawing.text(bar + 16, y + 4, f"{value:.3g}".replace("-", "−"), "tick")
    return drawing.svg(left + SIDE + 64, top + SIDE + 44, name)


def _square(
    drawing: Drawing, at: tuple[float, float, float, float], depth: float, value: float
) -> None:
    left, top, width, height = at
    area = {"x": left, "y": top, "width": width, "height": height}
    kind = "cold" if value < 0 else "heat"
    drawing.add(el("rect", **area, class_=kind, fill_opacity=f"{depth:.2f}"))


# ---- rasters --------------------------------------------------------------------------------


def raster(
    drawing: Drawing,
    rows: Sequence[str],
    at: tuple[float, float, float, float],
    *,
    kind: str = "spikes",
    photo: str | None = None,
) -> None:
    """Draw rows of 0 and 1 into left, top, width and height: ones as boxes, over a photo's URI.

    Neighbours in a row become one box.
    """
    left, top, width, height = at
    cell, row_height = width / len(rows[0]), height / len(rows)
    drawing.box(*at, "inner")
    if photo is not None:
        area = {"x": left, "y": top, "width": width, "height": height}
        drawing.add(el("image", **area, href=photo, preserveAspectRatio="none"))
    steps = []
    for i, row in enumerate(rows):
        place = 0
        for bit, run in itertools.groupby(row):
            length = len(list(run))
            if bit == "1":
                box = (left + place * cell, top + i * row_height, length * cell)
                x, y, wide = map(number, box)
                steps.append(f"M{x} {y}h{wide}v{number(row_height)}h-{wide}z")
            place += length
    drawing.add(el("path", d="".join(steps), class_=kind))
    drawing.box(*at, "edge")


# ---- files ----------------------------------------------------------------------------------


def as_file(svg: Markup, legend: Mapping[str, Look] | None = None) -> str:
    """Make a chart of the page a file of its own: with its styles, light, and its legend below."""
    found = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)" [^>]*?aria-label="([^"]*)"', svg)
    assert found is not None  # Drawing.svg begins so
    width, height = float(found[1]), float(found[2])
    drawing = Drawing()
    for label, look in (legend or {}).items():
        height += 18.0
        dot = el("circle", cx=16.0, cy=height - 10, r=4.5, class_=f"dot {look.colour}")
        name, class_ = shorten(label, width - 40), f"label t-{look.colour}"
        drawing.parts.append(
            el("g", dot, el("text", name, x=26.0, y=height - 6, text_anchor="start", class_=class_))
        )
    height += 6
    colours, rules = _styles()
    body = svg.partition(">")[2].removesuffix("</svg>")
    ground = el("rect", x=0, y=0, width=width, height=height, fill=colours["paper"])
    inner = Markup("").join([ground, Markup(body), *drawing.parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(2 * width)}" height="{number(2 * height)}" role="img" '
        f'aria-label="{found[3]}">\n<style>{escape(rules)}</style>\n{inner}</svg>\n'
    )


def _styles() -> tuple[dict[str, str], str]:
    """Return the light colours by name, and the rules of charts with them for variables.

    Few programs that show SVG know variables.
    """
    sheet = environment().get_template("style.css").render()
    root = re.search(r":root \{(.*?)\}", sheet, re.DOTALL)
    assert root is not None  # the sheet begins with it
    colours = dict(re.findall(r"--([\w-]+): ([^;]+);", root[1]))
    found = (rule.strip() for rule in re.findall(r"[^{}]+\{[^{}]*\}", sheet))
    rules = [rule for rule in found if re.match(r"svg [^@{]*\{", rule)]
    text = "\n".join(["svg { font-family: sans-serif; }", *rules])
    return colours, re.sub(r"var\(--([\w-]+)\)", lambda each: colours[each[1]], text)
