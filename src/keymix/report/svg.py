# SPDX-License-Identifier: Apache-2.0
"""Inline SVG: elements with escaped text, axis scales with round ticks, labels that keep apart."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

CHAR_WIDTH = 7.0
"""Mean width of a character of 11.5 px label text, px; a little generous."""


def text_width(content: str) -> float:
    """Estimate the width of label text, px; wide characters (CJK, emoji) count double."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in content)
    return CHAR_WIDTH * (len(content) + wide)


def shorten(content: str, room: float) -> str:
    """Cut a label's middle out so that it fits into so many px; its ends tell it apart best."""
    if text_width(content) <= room:
        return content
    head, tail = content[: len(content) // 2], content[len(content) // 2 :]
    while (head or tail) and text_width(f"{head}…{tail}") > room:
        if len(head) > len(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return f"{head}…{tail}"


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def number(value: float) -> str:
    """Write a coordinate with at most two decimals."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def el(tag: str, *children: object, **attributes: object) -> Markup:
    """Make one element. Text children and attribute values are escaped.

    Args:
        tag: Element name.
        children: Elements (as they are) and texts (escaped).
        attributes: ``stroke_width=1`` becomes ``stroke-width="1"``, ``class_`` becomes ``class``;
            ``None`` leaves the attribute out.
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None:
            continue
        text = number(value) if isinstance(value, float) else str(value)
        words.append(f'{name.rstrip("_").replace("_", "-")}="{escape(text)}"')
    inner = Markup("").join(escape(child) for child in children)
    return Markup(f"<{' '.join(words)}>{inner}</{tag}>")


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "") -> Markup:
    """Make a text element whose baseline starts, is centred or ends at (x, y)."""
    return el("text", content, x=x, y=y, text_anchor=anchor, class_=class_ or None)


def path(points: Iterable[tuple[float, float]], *, close: bool = False) -> str:
    """Make path data for a polyline through the points."""
    steps = [f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(points)]
    return "".join(steps) + ("Z" if close else "")


def canvas(width: float, height: float, label: str, *children: object) -> Markup:
    """Wrap children into an SVG that scales with its column; `label` is read to the blind."""
    return el(
        "svg",
        *children,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values (1, 2, 2.5 or 5 times a power of ten) that lie within the range."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


@dataclass(frozen=True)
class Scale:
    """A straight axis: values low..high onto pixels start..end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @classmethod
    def around(
        cls, values: Sequence[float], start: float, end: float, *, pad: float = 0.08
    ) -> Scale:
        """Make an axis that holds the values with room (a share of their range) on both sides."""
        low, high = min(values), max(values)
        room = (high - low) * pad or abs(high) * 0.05 or 1.0
        return cls(low - room, high + room, start, end)


def marker(kind: str, x: float, y: float, *, class_: str, size: float = 4.5) -> Markup:
    """Draw a data point: circle, square, diamond, triangle, down, cross-less ring."""
    s = size
    shapes: dict[str, Callable[[], Markup]] = {
        "circle": lambda: el("circle", cx=x, cy=y, r=s, class_=class_),
        "ring": lambda: el("circle", cx=x, cy=y, r=s - 0.5, class_=f"{class_} ring"),
        "square": lambda: el("rect", x=x - s, y=y - s, width=2 * s, height=2 * s, class_=class_),
        "diamond": lambda: el(
            "path",
            d=path(
                [(x, y - 1.3 * s), (x + 1.3 * s, y), (x, y + 1.3 * s), (x - 1.3 * s, y)], close=True
            ),
            class_=class_,
        ),
        "triangle": lambda: el(
            "path",
            d=path([(x, y - 1.25 * s), (x + 1.2 * s, y + s), (x - 1.2 * s, y + s)], close=True),
            class_=class_,
        ),
        "down": lambda: el(
            "path",
            d=path([(x, y + 1.25 * s), (x + 1.2 * s, y - s), (x - 1.2 * s, y - s)], close=True),
            class_=class_,
        ),
    }
    return shapes[kind]()


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


@dataclass(frozen=True)
class Placed:
    """Where a label went: its baseline, its anchor, and whether it needs a line to its point."""

    x: float
    y: float
    anchor: str
    leader: bool


def place_labels(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    frame: Box,
    obstacles: Sequence[Box] = (),
) -> list[Placed]:
    """Put each label beside its point so that labels cover neither each other nor the points.

    Every label tries places around its point, the near ones first, and takes the first with the
    least overlap; the most crowded points choose first.

    Args:
        points: Pixel positions.
        labels: Their texts.
        frame: Labels stay inside it.
        obstacles: Further boxes to keep clear of, error bars for instance.
    """
    blocked = [(x - 6, y - 6, x + 6, y + 6) for x, y in points] + list(obstacles)
    placed: dict[int, Placed] = {}

    def crowd(i: int) -> float:
        return sum(math.dist(points[i], p) < 60 for p in points)

    for i in sorted(range(len(points)), key=crowd, reverse=True):
        (x, y), width = points[i], text_width(labels[i])
        best: tuple[float, Placed, Box] | None = None
        for rank, (dx, dy, anchor) in enumerate(_places()):
            left = {"start": x + dx, "middle": x + dx - width / 2, "end": x + dx - width}[anchor]
            box = (left, y + dy - 9, left + width, y + dy + 3)
            outside = (width * 12) - _overlap(box, frame)
            cost = sum(_overlap(box, other) for other in blocked) + 4 * outside + rank * 0.5
            if best is None or cost < best[0] - 1e-9:
                leader = math.hypot(dx, dy - 3) > 20
                best = (cost, Placed(x + dx, y + dy, anchor, leader), box)
        assert best is not None  # _places is never empty
        placed[i] = best[1]
        blocked.append(best[2])
    return [placed[i] for i in range(len(points))]


def _places() -> list[tuple[float, float, str]]:
    near: list[tuple[float, float, str]] = [
        (10, 4, "start"),
        (-10, 4, "end"),
        (0, -11, "middle"),
        (0, 19, "middle"),
        (9, -7, "start"),
        (9, 15, "start"),
        (-9, -7, "end"),
        (-9, 15, "end"),
    ]
    far: list[tuple[float, float, str]] = []
    for reach in (22, 34, 46, 60, 76):
        for dy in (-reach, reach):
            far += [(14, dy + 4, "start"), (-14, dy + 4, "end"), (0, dy + 4, "middle")]
        far += [(reach, 4, "start"), (-reach, 4, "end")]
    return near + far


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis: values low..high, both above 0, onto pixels start..end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within the range, and 2 and 5 times them where those are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5)):
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        inside = [v for v in values if low * 0.999 <= v <= high * 1.001]
        if len(inside) >= 3:
            return inside
    return inside


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places along an axis apart, each as little as its neighbours let it.

    Args:
        wanted: Where they would stand.
        gap: Least distance of two.
        low: None stands before it, unless there is no room.
        high: None stands behind it.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    groups: list[list[int]] = []
    for i in order:
        groups.append([i])
        # a group stands around the mean of what its members want
        while len(groups) > 1:
            above, below = (_start(group, wanted, gap, low, high) for group in groups[-2:])
            if above + gap * len(groups[-2]) <= below + 1e-9:
                break
            last = groups.pop()
            groups[-1] += last
    for group in groups:
        start = _start(group, wanted, gap, low, high)
        for rank, i in enumerate(group):
            placed[i] = start + rank * gap
    return placed


def _start(
    group: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float
) -> float:
    length = gap * (len(group) - 1)
    middle = sum(wanted[i] for i in group) / len(group)
    return max(low, min(high - length, middle - length / 2))
