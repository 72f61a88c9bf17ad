# SPDX-License-Identifier: Apache-2.0
"""Rasters of spikes as SVG: rows of dots, and A_t laid on the image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from markupsafe import Markup

from keymix.analysis.spikes_record import RasterReading
from keymix.report.svg import canvas, el, number, text

STYLE = """\
svg .spikes { fill: var(--ink); } svg .lit { fill: var(--c1); fill-opacity: 0.62; }
svg .edge { fill: none; stroke: var(--line); } svg .inner { fill: var(--card); }
"""
"""Rules that rasters need beside the page's own."""

WIDTH, LEFT, TOP = 430.0, 34.0, 6.0
LINE, GAP = 10.0, 12.0
STEPS, SIDE, APART = 4, 100.0, 8.0


def raster(found: RasterReading) -> Markup:
    """Draw A_t, K and X' of a segment of tokens, a column a token.

    Args:
        found: The spikes.
    """
    channels, count = len(found.keys), len(found.keys[0])
    cell = (WIDTH - LEFT - 4) / count
    start = found.start
    segment = found.attention[found.step][start : start + count]
    height = min(cell, 180 / channels)
    top = TOP
    drawn: list[Markup] = []
    for name, rows, row in (
        ("A_t", [segment], LINE),
        ("K", found.keys, height),
        ("X'", found.masked, height),
    ):
        drawn += _panel(name, rows, top, cell, row)
        top += row * len(rows) + GAP
    foot = top - GAP
    for i in sorted({0, count // 2, count - 1}):
        at = LEFT + (i + 0.5) * cell
        drawn.append(text(at, foot + 14, str(start + i), anchor="middle", class_="tick"))
    middle = LEFT + (WIDTH - LEFT) / 2
    drawn.append(text(middle, foot + 30, "token", anchor="middle", class_="title"))
    return canvas(WIDTH, foot + 36, title(found), *drawn)


def title(found: RasterReading) -> str:
    """Say which head of which block at which step a raster shows."""
    stage = f"stage {found.stage}, " if found.stage else ""
    block = f"block {found.block}" if found.block else found.path
    return (
        f"{stage}{block}, head {found.head + 1} of {found.heads}, "
        f"step {found.step + 1} of {len(found.attention)}"
    )


def _panel(name: str, rows: Sequence[str], top: float, cell: float, height: float) -> list[Markup]:
    wide, high = cell * len(rows[0]), height * len(rows)
    middle = top + high / 2 + 4
    return [
        el("rect", x=LEFT, y=top, width=wide, height=high, class_="inner"),
        el("path", d=_dots(rows, LEFT, top, cell, height), class_="spikes"),
        el("rect", x=LEFT, y=top, width=wide, height=high, class_="edge"),
        text(LEFT - 8, middle, name, anchor="end", class_="tick"),
    ]


def _dots(rows: Sequence[str], left: float, top: float, width: float, height: float) -> str:
    """Make path data of the ones in rows of 0 and 1; neighbours in a row become one box."""
    steps = []
    for i, row in enumerate(rows):
        at = 0
        for bit, run in itertools.groupby(row):
            length = len(list(run))
            if bit == "1":
                box = (left + at * width, top + i * height, length * width)
                x, y, wide = map(number, box)
                steps.append(f"M{x} {y}h{wide}v{number(height)}h-{wide}z")
            at += length
    return "".join(steps)


def on_image(found: RasterReading, photo: str | None) -> Markup:
    """Lay A_t on the image, a picture a time step.

    Args:
        found: The spikes.
        photo: The image as a data URI; None draws the spikes alone.
    """
    rows, columns = found.grid
    every = found.attention
    across = min(STEPS, len(every))
    side_y = SIDE * rows / columns
    parts: list[Markup] = []
    for step, bits in enumerate(every):
        left = (step % across) * (SIDE + APART)
        top = TOP + (step // across) * (side_y + 26)
        lines = [bits[i * columns : (i + 1) * columns] for i in range(rows)]
        area = {"x": left, "y": top, "width": SIDE, "height": side_y}
        parts.append(el("rect", **area, class_="inner"))
        if photo is not None:
            parts.append(el("image", **area, href=photo, preserveAspectRatio="none"))
        dots = _dots(lines, left, top, SIDE / columns, side_y / rows)
        parts.append(el("path", d=dots, class_="lit"))
        parts.append(el("rect", **area, class_="edge"))
        share = bits.count("1") / len(bits)
        told = f"step {step + 1}: {share * 100:.0f} %"
        parts.append(text(left + SIDE / 2, top + side_y + 15, told, anchor="middle", class_="tick"))
    lines_down = -(-len(every) // across)
    wide = STEPS * (SIDE + APART) - APART
    return canvas(
        wide, TOP + lines_down * (side_y + 26), f"A_t on the image, {title(found)}", *parts
    )
