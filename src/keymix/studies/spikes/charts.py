# SPDX-License-Identifier: Apache-2.0
"""The charts of a study of spikes: rates along blocks and steps, energy, rasters of spikes."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from keymix.analysis.spikes_record import Firing, RasterReading, SpikesStudy, parts
from keymix.report import charts, formats
from keymix.report.charts import Chart, Dots, Line, Look, blank, dots, raster
from keymix.report.svg import SIZE, colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    y_label = "spikes per neuron and step"
    draw = partial(charts.curves, lines=lines, x_label=x_label, y_label=y_label, holds=(0.0,))
    return Chart(key, caption, draw)


def energy_by_part(studies: Mapping[str, SpikesStudy], looks: Mapping[str, Look]) -> Chart:
    """Draw the energy of each part of the models: a dot, and a line from least to most."""
    every = {label: {part.name: part for part in parts(study)} for label, study in studies.items()}
    names = list(dict.fromkeys(name for found in every.values() for name in found))
    most = max((p.high for found in every.values() for p in found.values()), default=0.0) or 1.0
    unit, size = formats.energy_unit(most)
    series = []
    for label, found in every.items():
        known = [found.get(name) for name in names]
        middle = [None if part is None else part.middle / size for part in known]
        ends = [None if part is None else (part.low / size, part.high / size) for part in known]
        series.append(Dots(label, looks[label], middle, ends))
    x_label = f"energy of one image, {unit}"
    draw = partial(dots, names=names, series=series, x_label=x_label)
    caption = (
        "Energy by part of the model. The dot counts every spike as one addition. Where inputs "
        "exceed 1 the bar runs from one addition to one multiply-add for each that is not 0."
    )
    height = (13.0 * len(studies) + 8) * len(names) + 48
    return Chart("energy", caption, draw, (SIZE[0], height))


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


def of_tokens(found: RasterReading) -> Chart:
    """Draw A_t, K and X' of a segment of tokens, a column per token, a row per channel."""
    channels, count, start = len(found.keys), len(found.keys[0]), found.start
    cell = (WIDTH - LEFT - 4) / count
    segment = found.attention[found.step][start : start + count]
    height = min(cell, 180 / channels)
    panels = (("A_t", [segment], 10.0), ("K", found.keys, height), ("X'", found.masked, height))
    foot = sum(row * len(rows) + 12.0 for _, rows, row in panels)

    def draw(ax: Axes) -> None:
        blank(ax, WIDTH, foot + 36)
        top, soft = 6.0, {"color": colours()["soft"]}
        for name, rows, row in panels:
            high = row * len(rows)
            raster(ax, rows, (LEFT, top, cell * count, high))
            ax.text(LEFT - 8, top + high / 2, name, ha="right", va="center", **soft)
            top += high + 12.0
        for i in sorted({0, count // 2, count - 1}):
            ax.text(LEFT + (i + 0.5) * cell, foot + 6, str(start + i), ha="center", **soft)
        ax.text(LEFT + (WIDTH - LEFT) / 2, foot + 24, "token", ha="center", **soft)

    return Chart("raster", title(found), draw, (WIDTH, foot + 36))


def on_image(found: RasterReading, photo: str | None) -> Chart:
    """Draw A_t over the image (a data URI, or None for spikes alone), one picture per step."""
    rows, columns = found.grid
    most, side, apart = 4, 100.0, 8.0
    across = min(most, len(found.attention))
    high = side * rows / columns
    size = most * (side + apart) - apart, 6.0 + -(-len(found.attention) // across) * (high + 26)

    def draw(ax: Axes) -> None:
        from keymix.data.decode import open_image  # which loads torch

        blank(ax, *size)
        picture = None if photo is None else open_image(b64decode(photo.partition(",")[2]))
        for step, bits in enumerate(found.attention):
            left, top = (step % across) * (side + apart), 6.0 + (step // across) * (high + 26)
            if picture is not None:
                ends = (left, left + side, top + high, top)
                ax.imshow(picture.convert("RGB"), extent=ends, interpolation="none", aspect="auto")
            lines = [bits[i * columns : (i + 1) * columns] for i in range(rows)]
            raster(ax, lines, (left, top, side, high), colour="c1", opacity=0.62)
            text = f"step {step + 1}: {bits.count('1') / len(bits) * 100:.0f} %"
            ax.text(left + side / 2, top + high + 14, text, ha="center", color=colours()["soft"])
        ax.set(xlim=(0, size[0]), ylim=(size[1], 0))

    return Chart("image", f"A_t on the image, {title(found)}", draw, size)
