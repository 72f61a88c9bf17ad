# SPDX-License-Identifier: Apache-2.0
"""Attention over photos, or whole maps as matrices: a grid of cells as a PNG and on the page."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from keymix.report.formats import ratio
from keymix.report.pictures import FULL, HEAT, jpeg_uri, picture, png_uri

FloatArray = npt.NDArray[np.float64]
Scale = Literal["shared", "each"]

CELL, DPI = 1.6, 110
"""Inches of a cell of a PNG, and pixels per inch."""

BAND = 10
"""Columns next to one another; more continue below."""

CLIPPED = 99.8
"""Percentile of all weights that the shared scale ends at; what lies above is drawn like it."""

SIDE = 200
"""Pixels of a picture's longer side on the page."""

_DIM = 0.62


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

    @property
    def span(self) -> str:
        """The least and the largest weight."""
        return f"{ratio(float(self.shown.min()))} to {ratio(float(self.shown.max()))}×"


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
        """Run from zero to where most weights end, and to `FULL` times even attention at least.

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

    def over(self, ground: FloatArray, values: npt.NDArray[Any]) -> FloatArray:
        """Draw weights over a ground ``[H, W, 3]``, the more opaque the larger: RGB, 0..1."""
        share = self.share(values)
        colour = np.array(HEAT) / 255
        if self.signed:
            from matplotlib import colormaps

            colour = colormaps["RdBu_r"](np.clip((share + 1) / 2, 0, 1))[..., :3]
        opacity = 0.92 * np.clip(np.abs(share), 0, 1)[..., None] ** 0.8
        out: FloatArray = ground * (1 - opacity) + colour * opacity
        return out

    @property
    def strip(self) -> FloatArray:
        """The scale itself, ``[1, 128, 3]``, the largest weight on the right."""
        ground = np.full((1, 128, 3), _DIM / 2)
        return self.over(ground, np.linspace(self.low, self.high, 128)[None])

    @property
    def uri(self) -> str:
        """The scale for the page."""
        return encoded(self.strip)

    @property
    def even(self) -> float:
        """Where even attention lies on it, in percent."""
        return 100 * (1 - self.low) / (self.high - self.low)


def shaded(cell: Cell, photo: npt.NDArray[np.uint8] | None, over: Range) -> FloatArray:
    """Draw a map over its photo, uint8 ``[C, H, W]``, or by itself: ``[H, W, 3]``, 0..1.

    Over a photo a map of any grid is interpolated bilinearly and cut where the photo ends; by
    itself it is averaged down to what a cell can show.
    """
    assert cell.values is not None
    if photo is None:
        small = Image.fromarray(cell.values.astype(np.float32))
        small.thumbnail((4 * round(CELL * DPI),) * 2, Image.Resampling.BOX)
        values = np.asarray(small)
        return over.over(np.full((*values.shape, 3), _DIM / 2), values)
    height, width = photo.shape[1:]
    size = round(width / cell.image[1]), round(height / cell.image[0])
    whole = Image.fromarray(cell.values.astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    grey = np.asarray(picture(photo).convert("L"), dtype=np.float64)[..., None] / 255
    return over.over(np.repeat(grey * _DIM, 3, axis=2), np.asarray(whole)[:height, :width])


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One figure: the name of its file, what it shows, and what is in it.

    One scale is ``"shared"`` by all cells, or ``"each"`` cell ends at its own extremes.
    """

    file: str
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Row]
    scale: Scale = "shared"

    @cached_property
    def ranges(self) -> dict[bool, Range]:
        """The shared scale of the cells of either kind, by whether they are apart."""
        kinds: dict[bool, list[FloatArray]] = {}
        for cell in (cell for row in self.rows for cell in row.cells):
            if cell.values is not None:
                kinds.setdefault(cell.apart, []).append(cell.shown)
        return {apart: Range.shared(kinds[apart]) for apart in sorted(kinds)}

    @property
    def bars(self) -> list[tuple[str, Range]]:
        """The scales that cells share, by what of; none where each cell has its own."""
        names = {False: "blocks", True: "rollout"}
        shared = self.ranges if self.scale == "shared" else {}
        return [(names[apart], over) for apart, over in shared.items()]

    def pixels(self, row: Row, cell: Cell) -> FloatArray:
        """Draw a cell: ``[H, W, 3]``, 0..1."""
        over = self.ranges[cell.apart] if self.scale == "shared" else Range.own(cell.shown)
        return shaded(cell, row.photo, over)

    def png(self) -> bytes:
        """Draw all as a PNG: rows of maps, headings over the columns, scales to the right."""
        from matplotlib.figure import Figure

        photos = any(row.photo is not None for row in self.rows)
        count = math.ceil(len(self.columns) / BAND)
        wide = math.ceil(len(self.columns) / count)
        labels = [textwrap.fill(row.label, 24) for row in self.rows]
        lead = 0.08 * max(len(line) for label in labels for line in label.splitlines())
        width = lead + (wide + photos) * (CELL + 0.1) + 1.2 * len(self.bars)
        note = textwrap.wrap(self.note, max(20, int(width / 0.075)))
        tall = [CELL * _aspect(row) + 0.4 for row in self.rows]
        size = (width, count * (0.25 + sum(tall)) + 0.4 + 0.16 * len(note))
        figure = Figure(figsize=size, dpi=DPI, layout="compressed")
        title = textwrap.fill(self.title, max(20, int(width / 0.1)))
        figure.suptitle(title, fontsize=10, weight="bold", parse_math=False)
        figure.supxlabel("\n".join(note), fontsize=8, color="#555", parse_math=False)
        axes = figure.subplots(
            count * len(self.rows), wide + photos, squeeze=False, height_ratios=tall * count
        )
        for ax in axes.flat:
            ax.set(xticks=[], yticks=[], frame_on=False)
        for i, line in enumerate(axes):
            band, r = divmod(i, len(self.rows))
            row = self.rows[r]
            line[0].set_ylabel(
                labels[r], fontsize=8, rotation=0, ha="right", va="center", parse_math=False
            )
            if row.photo is not None:
                line[0].imshow(np.asarray(picture(row.photo).convert("RGB")))
            first = band * wide
            shown = zip(self.columns[first : first + wide], row.cells[first:], strict=False)
            for ax, (heading, cell) in zip(line[photos:], shown, strict=False):
                self._cell(ax, row, cell)
                if r == 0:
                    ax.set_title(heading, fontsize=8)
        for of, over in reversed(self.bars):
            self._bar(figure, axes, of, over)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", metadata={"Software": None})
        return stream.getvalue()

    def _cell(self, ax: Any, row: Row, cell: Cell) -> None:
        if cell.values is None:
            why = textwrap.fill(cell.why, 12)
            ax.text(0.5, 0.5, why, fontsize=8, ha="center", color="#666", transform=ax.transAxes)
            return
        pixels = self.pixels(row, cell)
        ax.imshow(pixels)
        ax.set_xlabel(cell.span, fontsize=8, color="#555")
        if cell.mark is not None:
            y, x = (at * side - 0.5 for at, side in zip(cell.mark, pixels.shape[:2], strict=True))
            ax.plot([x], [y], "s", ms=7, mfc="none", mec="#19e3ff", mew=1.4)

    def _bar(self, figure: Any, axes: Any, of: str, over: Range) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize

        scale = ScalarMappable(Normalize(over.low, over.high), ListedColormap(over.strip[0]))
        bar = figure.colorbar(scale, ax=axes, aspect=7 * len(axes), shrink=0.8)
        ends = {1.0: "1× even", over.high: f"≥ {ratio(over.high)}×"}
        if over.high < 12:  # else 0 lies where 1 does
            ends[over.low] = f"{ratio(over.low)}×"
        bar.set_ticks(list(ends), labels=list(ends.values()), fontsize=7)
        bar.ax.axhline(1.0, color="white", lw=1.2)
        if len(self.bars) > 1:
            bar.ax.set_title(of, fontsize=8)

    @property
    def coarse(self) -> bool:
        """Whether the page enlarges its photos pixel by pixel."""
        sides = [min(row.photo.shape[1:]) for row in self.rows if row.photo is not None]
        return min(sides, default=0) < SIDE // 2

    def uri(self, row: Row, cell: Cell | None = None) -> str:
        """Encode a cell for the page, or the photo of a row."""
        if cell is not None:
            return encoded(self.pixels(row, cell))
        assert row.photo is not None
        return encoded(np.asarray(picture(row.photo)) / 255)


def _aspect(row: Row) -> float:
    """Height of a row's cells at a width of one."""
    shapes = [row.photo.shape[1:]] if row.photo is not None else []
    shapes += [cell.values.shape for cell in row.cells if cell.values is not None]
    tall, wide = shapes[0] if shapes else (1, 1)
    return min(3.0, max(0.3, float(tall / wide)))


def encoded(pixels: FloatArray) -> str:
    """Encode pixels, 0..1, as a data URI, `SIDE` at most on the longer side."""
    made = Image.fromarray(np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8))
    if max(made.size) > SIDE:
        made.thumbnail((SIDE, SIDE))
    return jpeg_uri(made) if min(made.size) > SIDE // 2 else png_uri(made)
