# SPDX-License-Identifier: Apache-2.0
"""Attention drawn over photos, or whole maps as matrices: a grid of cells as one PNG."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from keymix.report.pictures import HEAT, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[np.float64]
Scale = Literal["shared", "each"]

CELL, GAP = 1.55, 0.14  # inches
BAND = 10
"""Columns next to one another; more continue below."""

DPI = 110
FULL = 3.0
"""Times even attention that the shared scale reaches at least."""

CLIPPED = 99.8
"""Percentile of all weights that the shared scale ends at; what lies above is drawn like it."""

_DIM, _LEFT, _TOP, _BAR = 0.62, 0.25, 0.62, 0.95
_APART = 0.13  # inches between labels of the bar
_CHARACTER = 0.075  # inches of a character at 8 points


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One map: weights as multiples of even attention, rows and columns; None where there is none.

    `image` is the photo's height and width as shares of what the map covers; the rest of the map
    lies on padding. `mark` is where the query lies, as shares of the photo. A cell that is `apart`,
    such as rollout, shares a scale of colours with its own kind alone. `why` is written where there
    is no map.
    """

    values: FloatArray | None
    image: tuple[float, float] = (1.0, 1.0)
    mark: tuple[float, float] | None = None
    apart: bool = False
    why: str = "no map"

    @property
    def shown(self) -> FloatArray:
        """The weights of positions that have a part of the photo, without those on padding."""
        assert self.values is not None
        down, across = (
            math.ceil(round(side * share, 6))
            for side, share in zip(self.values.shape, self.image, strict=True)
        )
        return self.values[:down, :across]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Maps next to one another, as many as the figure has columns, and what they have in common.

    `photo` is what the model was shown, uint8 ``[C, H, W]``; None draws the maps as they are.
    """

    label: str
    cells: tuple[Cell, ...]
    photo: npt.NDArray[np.uint8] | None


@dataclass(frozen=True)
class Range:
    """The weights that a scale of colours runs over.

    `low` is drawn transparent, or the end of its colour where weights run below 0; `high` is drawn
    opaque, as all above it.
    """

    low: float
    high: float

    @classmethod
    def shared(cls, values: Sequence[FloatArray]) -> Range:
        """Run from zero to where most weights end, and to `FULL` at least.

        So even attention stays faint: a map without a peak shows nothing.
        """
        every = np.concatenate([each.ravel() for each in values])
        high = max(FULL, float(np.percentile(np.abs(every), CLIPPED)))
        return cls(-high if (every < 0).any() else 0.0, high)

    @classmethod
    def own(cls, values: FloatArray) -> Range:
        """Run over one map's weights, alike on both sides of zero where they have both signs."""
        low, high = float(values.min()), float(values.max())
        if low < 0 < high:
            low, high = -max(-low, high), max(-low, high)
        return cls(low, high) if high > low else cls(low - 1, high)

    @property
    def signed(self) -> bool:
        """Whether weights below zero have a colour of their own."""
        return self.low < 0 < self.high

    def share(self, values: npt.NDArray[Any]) -> FloatArray:
        """Return weights as shares of the scale: 0..1, signed ones -1..1."""
        low = 0.0 if self.signed else self.low
        shares: FloatArray = (np.asarray(values, dtype=np.float64) - low) / (self.high - low)
        return shares


def draw(
    rows: Sequence[Row], columns: Sequence[str], *, title: str, note: str, scale: Scale = "shared"
) -> bytes:
    """Draw rows of maps as a PNG, a title in bold and a note above, headings over the columns.

    One scale is ``"shared"`` by all cells, or ``"each"`` cell ends at its own maximum.
    """
    from matplotlib.figure import Figure

    photos = any(row.photo is not None for row in rows)
    count = math.ceil(len(columns) / BAND)
    wide = math.ceil(len(columns) / count)
    bands = [range(i, min(i + wide, len(columns))) for i in range(0, len(columns), wide)]
    labels = [textwrap.fill(row.label, 24, break_long_words=True) for row in rows]
    longest = max(len(line) for label in labels for line in label.splitlines())
    lead = 0.15 + longest * _CHARACTER + 0.1
    across = max(map(len, bands)) + photos
    heights = [_height(row) for row in rows]
    band_height = 0.3 + sum(heights) + 0.27 * len(rows)
    shared = shared_ranges(rows)
    ranges = list(shared.values()) if scale == "shared" else _own(rows)
    width = lead + across * (CELL + GAP) + _BAR * max(1, len(ranges))
    title_lines = textwrap.wrap(title, max(20, int(width / 0.095)))
    note_lines = textwrap.wrap(note, max(20, int(width / 0.072)))
    head = 0.2 + 0.2 * len(title_lines) + 0.17 * len(note_lines)
    height = head + len(bands) * band_height + 0.1
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    page = _Page(figure, width, height)
    page.text(0.15, 0.12, "\n".join(title_lines), size=10, weight="bold")
    page.text(0.15, 0.16 + 0.2 * len(title_lines), "\n".join(note_lines), size=8, colour="#555")

    y = head
    for band in bands:
        x = lead + (CELL + GAP if photos else 0)
        for i in band:
            page.text(x + CELL / 2, y + 0.08, columns[i], size=8, align="center")
            x += CELL + GAP
        y += 0.3
        for row, label, tall in zip(rows, labels, heights, strict=True):
            page.text(lead - 0.1, y + tall / 2, label, size=8, align="right", middle=True)
            x = lead
            if photos:
                if row.photo is not None:
                    page.image(x, y, tall, np.asarray(picture(row.photo).convert("RGB")))
                x += CELL + GAP
            for i in band:
                cell = row.cells[i]
                if cell.values is None:
                    page.text(
                        x + CELL / 2,
                        y + tall / 2,
                        textwrap.fill(cell.why, 12),
                        size=8,
                        align="center",
                        middle=True,
                        colour="#888",
                    )
                else:
                    over = shared[cell.apart] if scale == "shared" else Range.own(cell.shown)
                    page.cell(x, y, tall, cell, row.photo, over)
                x += CELL + GAP
            y += tall + 0.27
    for i, over in enumerate(ranges):
        at = width - _BAR * (len(ranges) - i) + 0.12
        page.bar(at, head + 0.3, heights[0], over, scale)
        if scale == "shared" and len(ranges) > 1:
            page.text(at - 0.05, head + 0.4 + heights[0], ("layers", "rollout")[i], size=8)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def shared_ranges(rows: Sequence[Row]) -> dict[bool, Range]:
    """Return the shared scale of the cells of either kind, by whether they are apart."""
    kinds: dict[bool, list[FloatArray]] = {}
    for cell in (cell for row in rows for cell in row.cells):
        if cell.values is not None:
            kinds.setdefault(cell.apart, []).append(cell.shown)
    return {apart: Range.shared(kinds[apart]) for apart in sorted(kinds)}


def _own(rows: Sequence[Row]) -> list[Range]:
    """Return a scale to show as a bar for maps of one sign, and one for those of both."""
    drawn = [c.shown for row in rows for c in row.cells if c.values is not None]
    return list({over.signed: over for over in map(Range.own, drawn)}.values())


def overlaid(photo: npt.NDArray[np.uint8], cell: Cell, over: Range) -> FloatArray:
    """Draw a map over a photo, uint8 ``[C, H, W]``, the more opaque the larger the weight.

    The map, of any grid, is interpolated bilinearly and cut where the photo ends. Returns
    ``[H, W, 3]``, 0..1.
    """
    assert cell.values is not None
    height, width = photo.shape[1:]
    down, across = round(height / cell.image[0]), round(width / cell.image[1])
    small = Image.fromarray(over.share(cell.values).astype(np.float32))
    whole = np.asarray(small.resize((across, down), Image.Resampling.BILINEAR))
    large = whole[:height, :width]
    grey = np.asarray(picture(photo).convert("L"), dtype=np.float64)[..., None] / 255
    return blended(np.repeat(grey * _DIM, 3, axis=2), large, over.signed)


def blended(ground: FloatArray, share: npt.NDArray[Any], signed: bool) -> FloatArray:
    """Colour shares of a scale over a ground ``[H, W, 3]``."""
    colour = coloured(share, signed)
    opacity = 0.92 * np.clip(np.abs(share), 0, 1)[..., None] ** 0.8
    out: FloatArray = ground * (1 - opacity) + colour * opacity
    return out


def coloured(share: npt.NDArray[Any], signed: bool) -> FloatArray:
    """Return the colours of shares of a scale, ``[H, W, 3]``."""
    if signed:
        from matplotlib import colormaps

        found: FloatArray = colormaps["RdBu_r"](np.clip((share + 1) / 2, 0, 1))[..., :3]
        return found
    one: FloatArray = np.broadcast_to(np.array(HEAT) / 255, (*share.shape, 3))
    return one


def _height(row: Row) -> float:
    """Height of a row's cells in inches, at their width."""
    shapes = [row.photo.shape[1:]] if row.photo is not None else []
    shapes += [cell.values.shape for cell in row.cells if cell.values is not None]
    tall, wide = shapes[0] if shapes else (1, 1)
    share: float = tall / wide
    return CELL * min(3.0, max(0.3, share))


class _Page:
    """Places things on a figure in inches from its top left."""

    def __init__(self, figure: Figure, width: float, height: float) -> None:
        self.figure, self.width, self.height = figure, width, height

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float,
        align: str = "left",
        weight: str = "normal",
        colour: str = "#111",
        middle: bool = False,
    ) -> None:
        self.figure.text(
            x / self.width,
            1 - y / self.height,
            words,
            fontsize=size,
            ha=align,
            va="center" if middle else "top",
            weight=weight,
            color=colour,
            parse_math=False,
        )

    def axes(self, x: float, y: float, wide: float, tall: float) -> Any:
        box = (x / self.width, 1 - (y + tall) / self.height, wide / self.width, tall / self.height)
        axes = self.figure.add_axes(box)
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def image(self, x: float, y: float, tall: float, pixels: npt.NDArray[Any]) -> Any:
        axes = self.axes(x, y, CELL, tall)
        axes.imshow(pixels, aspect="auto", interpolation="antialiased", extent=(0, 1, 1, 0))
        return axes

    def cell(
        self,
        x: float,
        y: float,
        tall: float,
        cell: Cell,
        photo: npt.NDArray[np.uint8] | None,
        over: Range,
    ) -> None:
        axes = self.image(x, y, tall, shaded(cell, photo, over))
        if cell.mark is not None:
            down, right = cell.mark
            axes.plot([right], [down], "s", ms=7, mfc="none", mec="#19e3ff", mew=1.4)
            axes.set_xlim(0, 1)
            axes.set_ylim(1, 0)
        label = span(cell.shown)
        self.text(x + CELL / 2, y + tall + 0.04, label, size=8, align="center", colour="#555")

    def bar(self, x: float, y: float, tall: float, over: Range, scale: Scale) -> None:
        low = -1.0 if over.signed else 0.0
        axes = self.axes(x, y, 0.16, tall)
        axes.imshow(strip(over), aspect="auto", extent=(0, 1, low, 1))
        for end in (low, (1 + low) / 2, 1.0):
            label = number(end * over.high) + "×"
            if scale == "each":
                label = _OWN[over.signed].get(end, "")
            elif end == 1.0:
                label = f"≥ {label}"
            at = y + tall * (1 - (end - low) / (1 - low))
            if scale == "shared" and abs(end - 1 / over.high) * tall < _APART * (1 - low):
                continue  # 1x is there
            self.text(x + 0.21, at, label, size=7, middle=True)
        if scale == "each":
            self.text(x - 0.05, y + tall + 0.1, "of each map", size=8, colour="#555")
            return
        even = 1 / over.high  # of the part of the bar that lies above zero
        at = y + tall * (1 - (even - low) / (1 - low))
        axes.axhline(even, color="white", lw=1.2)
        self.text(x + 0.21, at, "1× even", size=7, middle=True, weight="bold")


def matrix(values: FloatArray, over: Range) -> FloatArray:
    """Colour a whole map, averaged down to what a cell can show."""
    most = 4 * round(CELL * DPI)
    down, across = (max(1, math.ceil(side / most)) for side in values.shape)
    if down > 1 or across > 1:
        rows, columns = values.shape[0] // down * down, values.shape[1] // across * across
        cut = values[:rows, :columns].reshape(rows // down, down, columns // across, across)
        values = cut.mean((1, 3))
    share = over.share(values)
    return blended(np.full((*share.shape, 3), 0.5 * _DIM), share, over.signed)


def shaded(cell: Cell, photo: npt.NDArray[np.uint8] | None, over: Range) -> FloatArray:
    """Draw a map over its photo, or by itself where it is whole: ``[H, W, 3]``, 0..1."""
    return matrix(cell.shown, over) if photo is None else overlaid(photo, cell, over)


def strip(over: Range) -> FloatArray:
    """Draw a scale of colours upright, the largest weight on top."""
    share = np.linspace(1, -1.0 if over.signed else 0.0, 128)[:, None].repeat(8, axis=1)
    return blended(np.full((*share.shape, 3), 0.5 * _DIM), share, over.signed)


def span(values: FloatArray) -> str:
    """Write the least and the largest weight of a map."""
    return f"{number(float(values.min()))} to {number(float(values.max()))}×"


def number(value: float) -> str:
    """Write a multiple with three digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}".replace("-", "−")


_OWN = {False: {1.0: "max", 0.0: "min"}, True: {1.0: "+ max", 0.0: "0", -1.0: "− max"}}
