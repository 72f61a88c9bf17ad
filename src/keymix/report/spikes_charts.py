# SPDX-License-Identifier: Apache-2.0
"""The charts of a study of spikes: rates along blocks and steps, and where energy goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from keymix.analysis.spikes_record import Firing, SpikesStudy, parts
from keymix.report import formats, plots
from keymix.report.plots import Line, Look
from keymix.report.svg import Scale, canvas, el, shorten, text, ticks


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        key: Part of its file's name.
        svg: The drawing.
        caption: What it shows.
    """

    key: str
    svg: Markup
    caption: str


def along_blocks(studies: Mapping[str, SpikesStudy], looks: Mapping[str, Look]) -> list[Chart]:
    """Draw the rate of each part along the blocks, models overlaid, where there are several."""
    charts = []
    for role in _roles(studies):
        lines = _lines(studies, looks, role, _by_block)
        if any(len(line.xs) > 1 for line in lines):
            told = f"{role}: rate along the blocks."
            charts.append(_chart(f"block-{_word(role)}", lines, "block", told))
    return charts


def along_steps(studies: Mapping[str, SpikesStudy], looks: Mapping[str, Look]) -> list[Chart]:
    """Draw the rate at each time step, of all neurons and of each part, models overlaid."""
    if all(study.time_steps == 1 for study in studies.values()):
        return []
    charts = []
    for role in (None, *_roles(studies)):
        lines = _lines(studies, looks, role, _by_step)
        key = "step" if role is None else f"step-{_word(role)}"
        told = "All neurons" if role is None else f"{role}, mean over blocks"
        charts.append(_chart(key, lines, "time step", f"{told}: rate at each time step."))
    return charts


def _roles(studies: Mapping[str, SpikesStudy]) -> list[str]:
    found = dict.fromkeys(firing.role for study in studies.values() for firing in study.firings)
    return sorted((role for role in found if role), key=lambda role: role.startswith("MLP"))


def _lines(
    studies: Mapping[str, SpikesStudy], looks: Mapping[str, Look], role: str | None, points: Any
) -> list[Line]:
    lines = []
    for label, study in studies.items():
        mine = [f for f in study.firings if f.role == role or role is None]
        if role is None:
            mine = [f for f in mine if not f.inward]
        if at := points(mine):
            lines.append(Line(label, looks[label], *zip(*at, strict=True)))
    return lines


def _by_block(firings: list[Firing]) -> list[tuple[float, float]]:
    return [(float(f.block), f.rate) for f in firings if f.block is not None]


def _by_step(firings: list[Firing]) -> list[tuple[float, float]]:
    """Average over neurons, at each step that all layers have."""
    steps = min((len(firing.by_step) for firing in firings), default=0)
    neurons = sum(firing.neurons for firing in firings)
    return [
        (step + 1.0, sum(f.by_step[step] * f.neurons for f in firings) / neurons)
        for step in range(steps)
    ]


def _chart(key: str, lines: list[Line], x_label: str, caption: str) -> Chart:
    whole = sorted({x for line in lines for x in line.xs})
    every = -(-len(whole) // 8)
    svg = plots.curves(
        lines,
        x_label=x_label,
        y_label="spikes per neuron and step",
        name=caption,
        markers=len(whole) <= 16,
        holds=(0.0,),
        x_ticks=[(x, f"{x:.0f}") for x in whole[::every]],
    )
    return Chart(key, svg, caption)


def energy_by_part(studies: Mapping[str, SpikesStudy], looks: Mapping[str, Look]) -> Chart:
    """Draw the energy of each part of the models: a dot, and a line from least to most."""
    every = {label: {part.name: part for part in parts(study)} for label, study in studies.items()}
    names = list(dict.fromkeys(name for found in every.values() for name in found))
    most = max((p.high for found in every.values() for p in found.values()), default=0.0) or 1.0
    unit, size = _unit(most)
    left, wide, row = 96.0, 420.0, 13.0
    block = row * len(studies) + 8
    foot = 8 + block * len(names)
    x = Scale(0.0, most / size, left, wide - 12)
    drawn: list[Markup] = []
    for value in ticks(0.0, most / size, 6):
        drawn.append(el("line", x1=x(value), x2=x(value), y1=4.0, y2=foot, class_="grid"))
        drawn.append(text(x(value), foot + 15, f"{value:g}", anchor="middle", class_="tick"))
    for i, name in enumerate(names):
        top = 8 + i * block
        drawn.append(
            text(left - 8, top + block / 2, shorten(name, left), anchor="end", class_="tick")
        )
        for j, (label, found) in enumerate(every.items()):
            if name not in found:
                continue
            part, at, colour = found[name], top + (j + 0.5) * row, looks[label].colour
            low, middle, high = (x(value / size) for value in (part.low, part.middle, part.high))
            told = f"{label}, {name}: {formats.energy(part.middle)}"
            if part.high > part.low:
                told += f" ({formats.energy(part.low)} to {formats.energy(part.high)})"
            drawn += [
                el("line", x1=low, x2=high, y1=at, y2=at, class_=f"images {colour}"),
                el(
                    "g",
                    el("title", told),
                    el("circle", cx=middle, cy=at, r=4.0, class_=f"dot {colour}"),
                ),
            ]
    drawn.append(
        text(wide / 2, foot + 33, f"energy of one image, {unit}", anchor="middle", class_="title")
    )
    caption = (
        "Energy by part of the model. The dot counts every spike as one addition. Where inputs "
        "exceed 1 the bar runs from one addition to one multiply-add for each that is not 0."
    )
    return Chart("energy", canvas(wide, foot + 40, caption, *drawn), caption)


def _unit(most: float) -> tuple[str, float]:
    units = (("mJ", 1e9), ("µJ", 1e6), ("nJ", 1e3))
    return next((each for each in units if most >= each[1]), ("pJ", 1.0))


def _word(role: str) -> str:
    """Make a role's name fit for a file's name."""
    plain = role.replace("''", "-second").replace("'", "-masked").replace(" ", "-")
    return plain.lower()
