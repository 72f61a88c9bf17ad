# SPDX-License-Identifier: Apache-2.0
"""Matrices as squares of one colour, and charts as files that stand without the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from keymix.report.page import environment
from keymix.report.plots import Look
from keymix.report.svg import canvas, el, number, shorten, text

STYLE = """\
svg .heat { fill: var(--c1); } svg .cold { fill: var(--c0); } svg .hole { fill: var(--grid); }
svg .edge { fill: none; stroke: var(--line); } svg .inside { font-size: 8px; }
"""
"""Rules that heat maps need beside the page's own."""

SIDE, LEFT, TOP, FOOT, BAR = 300.0, 46.0, 8.0, 44.0, 64.0
_TICKS, _ROW = 8, 18.0
_NUMBERS = 8  # most rows of a matrix whose numbers fit into its cells

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
    """Draw a square matrix, the more opaque the larger the number.

    Args:
        values: Rows; None where there is no number.
        names: Of rows and columns alike.
        label: What rows and columns are.
        name: What is shown, for readers who cannot see it.
        high: The number that is opaque; of signed ones also its negative, in another colour.
        signed: Whether numbers may lie below 0; else those are drawn as 0.
        numbers: Write the numbers too, unless there are too many.
    """
    count = len(values)
    cell = SIDE / count
    parts = []
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            at = {"x": LEFT + j * cell, "y": TOP + i * cell, "width": cell, "height": cell}
            if value is None:
                parts.append(el("rect", **at, class_="hole"))
                continue
            depth = min(abs(value) / high, 1.0) if signed or value > 0 else 0.0
            kind = "cold" if value < 0 else "heat"
            parts.append(el("rect", **at, class_=kind, fill_opacity=f"{depth:.2f}"))
            if numbers and count <= _NUMBERS:
                told = f"{value:.2f}".replace("-", "−")
                across, down = LEFT + (j + 0.5) * cell, TOP + (i + 0.5) * cell + 3
                parts.append(text(across, down, told, anchor="middle", class_="inside"))
    parts.append(el("rect", x=LEFT, y=TOP, width=SIDE, height=SIDE, class_="edge"))
    for i in range(0, count, -(-count // _TICKS)):
        at_middle = (i + 0.5) * cell
        foot = TOP + SIDE + 16
        parts.append(text(LEFT + at_middle, foot, names[i], anchor="middle", class_="tick"))
        parts.append(text(LEFT - 6, TOP + at_middle + 4, names[i], anchor="end", class_="tick"))
    middle = LEFT + SIDE / 2
    parts.append(text(middle, TOP + SIDE + 36, label, anchor="middle", class_="title"))
    turned = f"translate(11 {number(TOP + SIDE / 2)}) rotate(-90)"
    shared = {"x": 0, "y": 0, "text_anchor": "middle", "class_": "title"}
    parts.append(el("text", label, **shared, transform=turned))
    parts += _bar(high, signed)
    return canvas(LEFT + SIDE + BAR, TOP + SIDE + FOOT, name, *parts)


def _bar(high: float, signed: bool) -> list[Markup]:
    """Draw the scale of colours."""
    steps, left = 10, LEFT + SIDE + 16
    lowest = -high if signed else 0.0
    size = SIDE / steps
    parts = []
    for i in range(steps):
        value = lowest + (high - lowest) * (i + 0.5) / steps
        at = {"x": left, "y": TOP + SIDE - (i + 1) * size, "width": 12.0, "height": size}
        kind = "cold" if value < 0 else "heat"
        parts.append(el("rect", **at, class_=kind, fill_opacity=f"{abs(value) / high:.2f}"))
    parts.append(el("rect", x=left, y=TOP, width=12.0, height=SIDE, class_="edge"))
    for value in (lowest, (lowest + high) / 2, high):
        at_y = TOP + SIDE * (high - value) / (high - lowest)
        told = f"{value:.3g}".replace("-", "−")
        parts.append(text(left + 16, at_y + 4, told, class_="tick"))
    return parts


def as_file(svg: Markup, legend: Mapping[str, Look] | None = None, *, style: str = "") -> str:
    """Make a chart of the page a file of its own: with its styles, light, and its legend below.

    Args:
        svg: What a chart's function returned.
        legend: Label to look; None for a chart that has no curves.
        style: Rules that it needs beside those of all pages.
    """
    found = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None  # canvas() begins so
    width, height = float(found[1]), float(found[2])
    rows = []
    for label, look in (legend or {}).items():
        height += _ROW
        name = text(26.0, height - 6, shorten(label, width - 40), class_=f"label t-{look.colour}")
        dot = el("circle", cx=16.0, cy=height - 10, r=4.5, class_=f"dot {look.colour}")
        rows.append(el("g", dot, name))
    height += 6
    body = svg.partition(">")[2].removesuffix("</svg>")
    ground = el("rect", x=0, y=0, width=width, height=height, fill=_variables()["paper"])
    inner = Markup("").join([ground, Markup(body), *rows])
    told = re.search(r'aria-label="([^"]*)"', svg)
    title = "" if told is None else told[1]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(2 * width)}" height="{number(2 * height)}" role="img" '
        f'aria-label="{title}">\n<style>{escape(_style(style))}</style>\n{inner}</svg>\n'
    )


def _sheet() -> str:
    return environment().get_template("style.css").render() + STYLE


def _variables() -> dict[str, str]:
    """Return the light colours by name."""
    root = re.search(r":root \{(.*?)\}", _sheet(), re.DOTALL)
    assert root is not None  # the sheet begins with it
    return dict(re.findall(r"--([\w-]+): ([^;]+);", root[1]))


def _style(more: str) -> str:
    """Return the rules of charts, with colours in place of variables: few programs know those."""
    colours = _variables()
    rules = [rule for rule in re.findall(r"[^{}]+\{[^{}]*\}", _sheet() + more) if _of_charts(rule)]
    text = "svg { font-family: sans-serif; }\n" + "\n".join(rule.strip() for rule in rules)
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], text)


def _of_charts(rule: str) -> bool:
    selector = rule.partition("{")[0].strip()
    return selector.startswith("svg ") and "@" not in selector
