# SPDX-License-Identifier: Apache-2.0
"""Curves on logarithmic axes, each named at its right end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from markupsafe import Markup

from keymix.report.plots import BOTTOM, LEFT, TOP, WIDTH, Line
from keymix.report.svg import (
    LogScale,
    canvas,
    el,
    log_ticks,
    marker,
    number,
    path,
    shorten,
    spread,
    text,
    text_width,
)

HEIGHT = 300.0
NAME = 128.0
"""Room for a name at the end of a curve, px; longer ones lose their middle."""

DEPTH = 10.0
"""A control's curve may go so many times below all others before it leaves the chart."""

_GAP, _REACH, _PAD = 12.5, 18.0, 1.25
_TICK = 34.0  # least distance of two numbers on the x axis, px


def floor(lines: Sequence[Line]) -> float:
    """Return the least value that the chart holds: controls may lie below it, others not."""
    values = [y for line in lines for y in line.ys if y > 0]
    kept = [y for line in lines if line.look.colour != "ctl" for y in line.ys if y > 0]
    return max(min(values), min(kept) / DEPTH) if kept else min(values)


def outside(lines: Sequence[Line]) -> list[Line]:
    """List the curves of which the chart shows nothing, since they lie below it."""
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
    """Draw curves with both axes logarithmic. Points at 0 or below are left out.

    Args:
        lines: The curves; some value of theirs is above 0.
        x_label: What x counts.
        y_label: What y is, with its unit.
        name: What the chart shows, for readers who cannot see it.
        marked: Labels of the curves whose points are drawn too.
    """
    low = floor(lines)
    shown = [line for line in lines if line not in outside(lines)]
    labels = [shorten(line.look.short, NAME) for line in shown]
    right = WIDTH - _REACH - max(text_width(label) for label in labels)
    xs = sorted({x for line in shown for x in line.xs})
    top = max(y for line in shown for y in line.ys)
    x = LogScale(xs[0], xs[-1], LEFT, right)
    y = LogScale(low / _PAD, top * _PAD, HEIGHT - BOTTOM, TOP)
    parts = _frame(x, y, xs, x_label, y_label)
    ends: list[tuple[float, float]] = []
    for line in shown:
        at = [(x(a), y(b)) for a, b in zip(line.xs, line.ys, strict=True) if b >= low]
        ends.append(at[-1])
        colour = line.look.colour
        hint = el("title", line.label)
        parts.append(el("path", hint, d=path(at), class_=f"curve {colour}"))
        if line.label in marked or len(at) == 1:
            parts += [
                marker(line.look.marker, *spot, class_=f"dot {colour}", size=3.2) for spot in at
            ]
    places = spread([py for _, py in ends], _GAP, TOP, HEIGHT - BOTTOM)
    for line, label, (px, py), place in zip(shown, labels, ends, places, strict=True):
        colour = line.look.colour
        start = right + _REACH - 4
        parts.append(el("line", x1=px + 4, y1=py, x2=start, y2=place, class_=f"leader {colour}"))
        told = text(start + 3, place + 4, label, class_=f"label t-{colour}")
        parts.append(el("g", el("title", line.label), told))
    return canvas(WIDTH, HEIGHT, name, *parts)


def _frame(
    x: LogScale, y: LogScale, xs: Sequence[float], x_label: str, y_label: str
) -> list[Markup]:
    parts: list[Markup] = []
    for value in log_ticks(y.low, y.high):
        at = y(value)
        parts.append(el("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        parts.append(text(x.start - 6, at + 4, _tick(value), anchor="end", class_="tick"))
    last = -_TICK
    for value in xs:
        at = x(value)
        parts.append(el("line", x1=at, x2=at, y1=y.start, y2=y.start + 4, class_="axis"))
        if at - last >= _TICK:
            last = at
            told = f"{value:,.10g}"
            parts.append(text(at, y.start + 17, told, anchor="middle", class_="tick"))
    parts.append(el("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"))
    middle = (x.start + x.end) / 2
    parts.append(text(middle, y.start + 36, x_label, anchor="middle", class_="title"))
    turned = f"translate(11 {number((y.start + y.end) / 2)}) rotate(-90)"
    title = el("text", y_label, x=0, y=0, text_anchor="middle", class_="title", transform=turned)
    return [*parts, title]


def _tick(value: float) -> str:
    for unit, size in ((" M", 1e6), (" k", 1e3)):
        if value >= 10 * size:
            return f"{value / size:,.10g}{unit}"
    return f"{value:,.10g}"
