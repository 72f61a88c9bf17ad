# SPDX-License-Identifier: Apache-2.0
"""The charts of a study of spikes: rates along blocks and steps, energy, rasters of spikes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from keymix.analysis.spikes_record import Firing, RasterReading, SpikesStudy, parts
from keymix.report import charts, formats
from keymix.report.charts import Chart, Line, Look, raster
from keymix.report.labels import shorten
from keymix.report.svg import Drawing, Scale, lower_axis, marker, ticks


def along_blocks(studies: Mapping[str, SpikesStudy], looks: Mapping[str, Look]) -> list[Chart]:
    """Draw the rate of each part along the blocks, models overlaid, where there are several."""
    drawn = []
    for role in _roles(studies):
        lines = _lines(studies, looks, role, _by_block)
        if any(len(line.xs) > 1 for line in lines):
            text = f"{role}: rate along the blocks."
            drawn.append(_chart(f"block-{_word(role)}", lines, "block", text))
    return drawn


def along_steps(studies: Mapping[str, SpikesStudy], looks: Mapping[str, Look]) -> list[Chart]:
    """Draw the rate at each time step, of all neurons and of each part, models overlaid."""
    if all(study.time_steps == 1 for study in studies.values()):
        return []
    drawn = []
    for role in (None, *_roles(studies)):
        lines = _lines(studies, looks, role, _by_step)
        key = "step" if role is None else f"step-{_word(role)}"
        text = "All neurons" if role is None else f"{role}, mean over blocks"
        drawn.append(_chart(key, lines, "time step", f"{text}: rate at each time step."))
    return drawn


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
    svg = charts.curves(
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
    unit, size = formats.energy_unit(most)
    left, wide, row = 96.0, 420.0, 13.0
    block = row * len(studies) + 8
    foot = 8 + block * len(names)
    x = Scale(0.0, most / size, left, wide - 12)
    drawing = Drawing()
    at = [(value, f"{value:g}") for value in ticks(x.low, x.high, 6)]
    lower_axis(drawing, x, 4.0, foot, at, (wide / 2, f"energy of one image, {unit}"))
    for i, name in enumerate(names):
        top = 8 + i * block
        drawing.text(left - 8, top + block / 2, shorten(name, left), "tick", "end")
        for j, (label, found) in enumerate(every.items()):
            if name not in found:
                continue
            part, y, colour = found[name], top + (j + 0.5) * row, looks[label].colour
            low, middle, high = (x(value / size) for value in (part.low, part.middle, part.high))
            text = f"{label}, {name}: {formats.energy(part.middle)}"
            if part.high > part.low:
                text += f" ({formats.energy(part.low)} to {formats.energy(part.high)})"
            drawing.line((low, high), (y, y), f"images {colour}")
            drawing.add(marker("circle", middle, y, class_=f"dot {colour}", size=4.0), text)
    caption = (
        "Energy by part of the model. The dot counts every spike as one addition. Where inputs "
        "exceed 1 the bar runs from one addition to one multiply-add for each that is not 0."
    )
    return Chart("energy", drawing.svg(wide, foot + 40, caption), caption)


def _word(role: str) -> str:
    """Make a role's name fit for a file's name."""
    plain = role.replace("''", "-second").replace("'", "-masked").replace(" ", "-")
    return plain.lower()


def title(found: RasterReading) -> str:
    """Say which head of which block at which step a raster shows."""
    stage = f"stage {found.stage}, " if found.stage else ""
    block = f"block {found.block}" if found.block else found.path
    return (
        f"{stage}{block}, head {found.head + 1} of {found.heads}, "
        f"step {found.step + 1} of {len(found.attention)}"
    )


WIDTH, LEFT = 430.0, 34.0


def of_tokens(found: RasterReading) -> Markup:
    """Draw A_t, K and X' of a segment of tokens, a column per token, a row per channel."""
    channels, count = len(found.keys), len(found.keys[0])
    cell = (WIDTH - LEFT - 4) / count
    start, height = found.start, min(cell, 180 / channels)
    segment = found.attention[found.step][start : start + count]
    drawing, top, gap = Drawing(), 6.0, 12.0
    panels = (("A_t", [segment], 10.0), ("K", found.keys, height), ("X'", found.masked, height))
    for name, rows, row in panels:
        high = row * len(rows)
        raster(drawing, rows, (LEFT, top, cell * count, high))
        drawing.text(LEFT - 8, top + high / 2 + 4, name, "tick", "end")
        top += high + gap
    foot = top - gap
    for i in sorted({0, count // 2, count - 1}):
        drawing.text(LEFT + (i + 0.5) * cell, foot + 14, str(start + i), "tick", "middle")
    drawing.text(LEFT + (WIDTH - LEFT) / 2, foot + 30, "token", "title", "middle")
    return drawing.svg(WIDTH, foot + 36, title(found))


def on_image(found: RasterReading, photo: str | None) -> Markup:
    """Draw A_t over the image (a data URI, or None for spikes alone), one picture per step."""
    rows, columns = found.grid
    most, side, apart = 4, 100.0, 8.0
    across = min(most, len(found.attention))
    side_y = side * rows / columns
    drawing = Drawing()
    for step, bits in enumerate(found.attention):
        left, top = (step % across) * (side + apart), 6.0 + (step // across) * (side_y + 26)
        lines = [bits[i * columns : (i + 1) * columns] for i in range(rows)]
        raster(drawing, lines, (left, top, side, side_y), kind="lit", photo=photo)
        text = f"step {step + 1}: {bits.count('1') / len(bits) * 100:.0f} %"
        drawing.text(left + side / 2, top + side_y + 15, text, "tick", "middle")
    foot = 6.0 + -(-len(found.attention) // across) * (side_y + 26)
    return drawing.svg(most * (side + apart) - apart, foot, f"A_t on the image, {title(found)}")
