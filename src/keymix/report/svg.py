# SPDX-License-Identifier: Apache-2.0
"""Marks and axes as inline SVG: elements with escaped text, straight and logarithmic scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from keymix.report.labels import text_width

LEFT = 54.0
"""Least room for the labels of a y axis, px."""

TICK = 0.92
"""Width of a tick label over that of the same text in a label."""


# ---- elements -------------------------------------------------------------------------------


def number(value: float) -> str:
    """Write a coordinate with at most two decimals."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def el(tag: str, *children: object, **attributes: object) -> Markup:
    """Make one element; text children and attribute values are escaped.

    ``stroke_width=1`` becomes ``stroke-width="1"``, ``class_`` becomes ``class``, and None leaves
    an attribute out.
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None:
            continue
        text = number(value) if isinstance(value, float) else str(value)
        words.append(f'{name.rstrip("_").replace("_", "-")}="{escape(text)}"')
    inner = Markup("").join(escape(child) for child in children)
    return Markup(f"<{' '.join(words)}>{inner}</{tag}>")


def path(points: Sequence[tuple[float, float]], *, close: bool = False) -> str:
    """Make path data for a polyline through the points."""
    steps = [f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(points)]
    return "".join(steps) + ("Z" if close else "")


_PLUS = tuple(
    (sx * x, sy * y)
    for sx, sy, corners in (
        (1, 1, ((1.4, 0.45), (0.45, 0.45), (0.45, 1.4))),
        (-1, 1, ((0.45, 1.4), (0.45, 0.45), (1.4, 0.45))),
        (-1, -1, ((1.4, 0.45), (0.45, 0.45), (0.45, 1.4))),
        (1, -1, ((0.45, 1.4), (0.45, 0.45), (1.4, 0.45))),
    )
    for x, y in corners
)
_STAR = tuple(
    ((1.5, 0.6)[i % 2] * math.sin(math.pi * i / 5), -(1.5, 0.6)[i % 2] * math.cos(math.pi * i / 5))
    for i in range(10)
)


def marker(kind: str, x: float, y: float, *, class_: str, size: float = 4.5) -> Markup:
    """Draw a data point: a circle, a ring, a square or another shape with corners."""
    if kind in ("circle", "ring"):
        r, more = (size, "") if kind == "circle" else (size - 0.5, " ring")
        return el("circle", cx=x, cy=y, r=r, class_=f"{class_}{more}")
    if kind == "square":
        side = 2 * size
        return el("rect", x=x - size, y=y - size, width=side, height=side, class_=class_)
    corners = {
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.25), (1.2, 1), (-1.2, 1)),
        "down": ((0, 1.25), (1.2, -1), (-1.2, -1)),
        "hexagon": ((1.2, 0), (0.6, 1.05), (-0.6, 1.05), (-1.2, 0), (-0.6, -1.05), (0.6, -1.05)),
        "bar": ((-1.4, -0.55), (1.4, -0.55), (1.4, 0.55), (-1.4, 0.55)),
        "plus": _PLUS,
        "cross": tuple(((x - y) * 0.71, (x + y) * 0.71) for x, y in _PLUS),
        "star": _STAR,
    }[kind]
    d = path([(x + dx * size, y + dy * size) for dx, dy in corners], close=True)
    return el("path", d=d, class_=class_)


class Drawing:
    """Marks on a canvas, px from its top left, each over those before it.

    A hint is shown when the pointer rests on a mark.
    """

    def __init__(self) -> None:
        self.parts: list[Markup] = []

    def add(self, mark: Markup, hint: str | None = None) -> None:
        """Add a mark."""
        self.parts.append(mark if hint is None else el("g", el("title", hint), mark))

    def line(
        self, x: tuple[float, float], y: tuple[float, float], class_: str, hint: str | None = None
    ) -> None:
        """Draw a straight line between two points, given as both x and both y."""
        self.add(el("line", x1=x[0], x2=x[1], y1=y[0], y2=y[1], class_=class_), hint)

    def text(
        self,
        x: float,
        y: float,
        content: str,
        class_: str,
        anchor: str = "start",
        hint: str | None = None,
    ) -> None:
        """Write a text whose baseline starts, is centred (middle) or ends at (x, y)."""
        self.add(el("text", content, x=x, y=y, text_anchor=anchor, class_=class_), hint)

    def box(self, left: float, top: float, width: float, height: float, class_: str) -> None:
        """Draw a rectangle."""
        self.add(el("rect", x=left, y=top, width=width, height=height, class_=class_))

    def rising(self, y: float, content: str) -> None:
        """Write the title of a y axis, upwards and centred at y."""
        turned = f"translate(11 {number(y)}) rotate(-90)"
        shared = {"text_anchor": "middle", "class_": "title"}
        self.add(el("text", content, x=0, y=0, **shared, transform=turned))

    def svg(self, width: float, height: float, label: str) -> Markup:
        """Make an SVG that scales with its column; `label` is read to the blind."""
        return el(
            "svg",
            *self.parts,
            viewBox=f"0 0 {number(width)} {number(height)}",
            role="img",
            aria_label=label,
            xmlns="http://www.w3.org/2000/svg",
        )


# ---- axes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """An axis: values low..high onto pixels start..end, straight or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def middle(self) -> float:
        """The pixel between its ends."""
        return (self.start + self.end) / 2

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        pad: float = 0.08,
        within: tuple[float | None, float | None] = (None, None),
    ) -> Scale:
        """Make an axis that holds the values with room (a share of their range) on both sides.

        It ends at the bounds `within` which values can be, so that a spread beyond them is cut.
        """
        low, high = min(values), max(values)
        room = (high - low) * pad or abs(high) * 0.05 or 1.0
        least, most = within
        low = low - room if least is None else max(least, low - room)
        high = high + room if most is None else min(most, high + room)
        return cls(low, high, start, end)


FEWEST = 3
"""Labelled values that an axis has at least."""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values (1, 2, 2.5 or 5 times a power of ten) within the range, three or more."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [m * power for m in (0.25, 0.5, 1, 2, 2.5, 5, 10)]
    widest = next(i for i, step in enumerate(steps) if step >= raw * 0.999)
    found: list[float] = []
    for step in steps[widest::-1]:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        found = [round(i * step, 12) for i in range(first, last + 1)]
        if len(found) >= min(count, FEWEST):
            break
    return found


def whole_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return whole numbers at equal distances within the range, three or more where it has them."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    steps = (m * 10**e for e in range(9) for m in (1, 2, 5))
    step = next(s for s in steps if last // s - (first - 1) // s <= most)
    return [float(v) for v in range(-(-first // step) * step, last + 1, step)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within the range, and closer round values where those are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        inside = [v for v in values if low * 0.999 <= v <= high * 1.001]
        if len(inside) >= FEWEST:
            return inside
    return ticks(low, high)


Ticks = Sequence[tuple[float, str]]
"""Values on an axis and their labels."""


def written(values: Sequence[float], *, percent: bool = False) -> list[tuple[float, str]]:
    """Write the values of an axis with as many decimals as distinguish them."""
    times = 100 if percent else 1
    step = times * (values[1] - values[0] if len(values) > 1 else 1.0)
    places = next((d for d in range(6) if abs(round(step, d) - step) < 1e-9), 6)
    return [(value, f"{value * times:.{places}f}") for value in values]


def y_ticks(y: Scale, *, percent: bool) -> list[tuple[float, str]]:
    """Return the round values of a y axis."""
    return written(ticks(y.low, y.high, 5), percent=percent)


def left_of(y: Scale, *, percent: bool) -> float:
    """Return where a chart begins, so that its tick labels keep clear of the axis title."""
    widest = max((text_width(label) for _, label in y_ticks(y, percent=percent)), default=0.0)
    return max(LEFT, 28 + TICK * widest)


def draw_frame(
    drawing: Drawing, x: Scale, y: Scale, titles: tuple[str, str], at: Sequence[Ticks]
) -> None:
    """Draw grid lines, tick labels and titles of both axes; an empty label leaves its tick."""
    for value, label in at[1]:
        drawing.line((x.start, x.end), (y(value), y(value)), "grid")
        drawing.text(x.start - 6, y(value) + 4, label.replace("-", "−"), "tick", "end")
    for value, label in at[0]:
        drawing.line((x(value), x(value)), (y.start, y.start + 4), "axis")
        if label:
            drawing.text(x(value), y.start + 17, label, "tick", "middle")
    drawing.line((x.start, x.end), (y.start, y.start), "axis")
    drawing.text(x.middle, y.start + 36, titles[0], "title", "middle")
    drawing.rising(y.middle, titles[1])


def lower_axis(
    drawing: Drawing, x: Scale, top: float, foot: float, at: Ticks, title: tuple[float, str]
) -> None:
    """Draw the axis of a chart of rows: lines from top to foot, the one at 0 in ink, a title."""
    for value, label in at:
        kind = "zero" if abs(value) < 1e-12 and x.low < 0 else "grid"
        drawing.line((x(value), x(value)), (top, foot), kind)
        drawing.text(x(value), foot + 15, label.replace("-", "−"), "tick", "middle")
    drawing.text(title[0], foot + 33, title[1], "title", "middle")
