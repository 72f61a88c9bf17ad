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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[np.float64]
Scale = Literal["shared", "each"]

CELL, GAP = 1.55, 0.14  # inches
BAND = 10
"""Columns beside one another; more go on below."""

DPI = 110
CLIPPED = 99.8
"""Percentile of all weights that the shared scale ends at; what lies above is drawn like it."""

_DIM, _LEFT, _TOP, _BAR = 0.62, 0.25, 0.62, 0.95
_CHARACTER = 0.075  # inches of a character at 8 points


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One map.

    Attributes:
        values: Weights as multiples of even attention, rows and columns; None where there is none.
        mark: Where the query lies, as shares of height and width; None for none.
    """

    values: FloatArray | None
    mark: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """Maps beside one another.

    Attributes:
        label: What they have in common.
        cells: As many as the figure has columns.
        photo: What the model was shown, uint8 ``[C, H, W]``; None draws the maps as they are.
    """

    label: str
    cells: tuple[Cell, ...]
    photo: npt.NDArray[np.uint8] | None


def top_of(values: Sequence[FloatArray]) -> tuple[float, bool]:
    """Return where a scale for some maps ends, and whether it runs below nought too."""
    every = np.concatenate([each.ravel() for each in values]) if values else np.ones(1)
    signed = bool((every < 0).any())
    top = float(np.percentile(np.abs(every), CLIPPED))
    return (top if top > 0 else 1.0), signed


def draw(
    rows: Sequence[Row], columns: Sequence[str], *, title: str, note: str, scale: Scale = "shared"
) -> bytes:
    """Draw a grid of maps.

    Args:
        rows: One below the other.
        columns: What stands above the columns.
        title: In bold, above all.
        note: A line below it: whose rows these are, which weights.
        scale: ``"shared"``, one for all cells; ``"each"`` lets every cell end at its own maximum.

    Returns:
        A PNG.
    """
    from matplotlib.figure import Figure

    photos = any(row.photo is not None for row in rows)
    bands = [range(i, min(i + BAND, len(columns))) for i in range(0, len(columns), BAND)]
    labels = [textwrap.fill(row.label, 24, break_long_words=True) for row in rows]
    longest = max(len(line) for label in labels for line in label.splitlines())
    lead = 0.15 + longest * _CHARACTER + 0.1
    across = max(map(len, bands)) + photos
    heights = [_height(row) for row in rows]
    band_height = 0.3 + sum(heights) + 0.27 * len(rows)
    width = lead + across * (CELL + GAP) + _BAR
    title_lines = textwrap.wrap(title, max(20, int(width / 0.095)))
    note_lines = textwrap.wrap(note, max(20, int(width / 0.072)))
    head = 0.2 + 0.2 * len(title_lines) + 0.17 * len(note_lines)
    height = head + len(bands) * band_height + 0.1
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    page = _Page(figure, width, height)
    page.text(0.15, 0.12, "\n".join(title_lines), size=10, weight="bold")
    page.text(0.15, 0.16 + 0.2 * len(title_lines), "\n".join(note_lines), size=8, colour="#555")

    drawn = [c.values for row in rows for c in row.cells if c.values is not None]
    top, signed = top_of(drawn)
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
                    page.image(x, y, tall, np.asarray(_picture(row.photo)))
                x += CELL + GAP
            for i in band:
                cell = row.cells[i]
                if cell.values is None:
                    page.text(
                        x + CELL / 2,
                        y + tall / 2,
                        "no map",
                        size=8,
                        align="center",
                        middle=True,
                        colour="#888",
                    )
                else:
                    end, below = (top, signed) if scale == "shared" else top_of_one(cell.values)
                    page.cell(x, y, tall, cell, row.photo, end, below)
                x += CELL + GAP
            y += tall + 0.27
    if drawn:
        page.bar(width - _BAR + 0.12, head + 0.3, heights[0], top, signed, scale)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def top_of_one(values: FloatArray) -> tuple[float, bool]:
    """Return the end of a map's own scale."""
    top = float(np.abs(values).max())
    return (top if top > 0 else 1.0), bool((values < 0).any())


def overlaid(
    photo: npt.NDArray[np.uint8], values: FloatArray, top: float, signed: bool
) -> FloatArray:
    """Lay a map over a photo, bilinear, the more opaque the larger the weight.

    Args:
        photo: uint8 ``[C, H, W]``.
        values: The map, of any grid.
        top: Weight that is drawn opaque.
        signed: Whether weights below nought have a colour of their own.

    Returns:
        ``[H, W, 3]``, 0..1.
    """
    height, width = photo.shape[1:]
    small = Image.fromarray(np.asarray(values / top, dtype=np.float32), mode="F")
    large = np.asarray(small.resize((width, height), Image.Resampling.BILINEAR))
    grey = np.asarray(_picture(photo).convert("L"), dtype=np.float64)[..., None] / 255
    return blended(np.repeat(grey * _DIM, 3, axis=2), large, signed)


def blended(ground: FloatArray, share: npt.NDArray[Any], signed: bool) -> FloatArray:
    """Colour shares of a scale over a ground ``[H, W, 3]``."""
    colour = coloured(share, signed)
    opacity = 0.92 * np.clip(np.abs(share), 0, 1)[..., None] ** 0.8
    out: FloatArray = ground * (1 - opacity) + colour * opacity
    return out


def coloured(share: npt.NDArray[Any], signed: bool) -> FloatArray:
    """Return the colours of shares of a scale, ``[H, W, 3]``."""
    from matplotlib import colormaps

    if signed:
        found: FloatArray = colormaps["RdBu_r"](np.clip((share + 1) / 2, 0, 1))[..., :3]
        return found
    # the lower end of the colours is as dark as a shadow in a photo
    rising: FloatArray = colormaps["inferno"](0.35 + 0.62 * np.clip(share, 0, 1))[..., :3]
    return rising


def _picture(photo: npt.NDArray[np.uint8]) -> Image.Image:
    if photo.shape[0] == 1:
        return Image.fromarray(photo[0]).convert("RGB")
    return Image.fromarray(np.ascontiguousarray(photo.transpose(1, 2, 0)))


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
        top: float,
        signed: bool,
    ) -> None:
        assert cell.values is not None
        if photo is None:
            pixels = matrix(cell.values / top, signed)
        else:
            pixels = overlaid(photo, cell.values, top, signed)
        axes = self.image(x, y, tall, pixels)
        if cell.mark is not None:
            down, right = cell.mark
            axes.plot([right], [down], "s", ms=7, mfc="none", mec="#19e3ff", mew=1.4)
            axes.set_xlim(0, 1)
            axes.set_ylim(1, 0)
        told = f"max {number(float(cell.values.max()))}×"
        self.text(x + CELL / 2, y + tall + 0.04, told, size=6.5, align="center", colour="#555")

    def bar(self, x: float, y: float, tall: float, top: float, signed: bool, scale: Scale) -> None:
        low = -1.0 if signed else 0.0
        share = np.linspace(1, low, 128)[:, None].repeat(8, axis=1)
        axes = self.axes(x, y, 0.16, tall)
        ground = np.full((*share.shape, 3), 0.5 * _DIM)
        axes.imshow(blended(ground, share, signed), aspect="auto", extent=(0, 1, low, 1))
        ends = [low, (1 + low) / 2, 1.0]
        for end in ends:
            told = number(end * top) + "×" if scale == "shared" else _share_of_max(end)
            if scale == "shared" and end == 1.0:
                told = f"≥ {told}"
            at = y + tall * (1 - (end - low) / (1 - low))
            self.text(x + 0.21, at, told, size=7, middle=True)
        under = "even = 1×" if scale == "shared" else "each map's own"
        self.text(x - 0.05, y + tall + 0.04, under, size=6.5, colour="#555")


def matrix(share: FloatArray, signed: bool) -> FloatArray:
    """Colour a whole map, averaged down to what a cell can show."""
    most = 4 * round(CELL * DPI)
    down, across = (max(1, math.ceil(side / most)) for side in share.shape)
    if down > 1 or across > 1:
        rows, columns = share.shape[0] // down * down, share.shape[1] // across * across
        cut = share[:rows, :columns].reshape(rows // down, down, columns // across, across)
        share = cut.mean((1, 3))
    ground = np.full((*share.shape, 3), 0.5 * _DIM)
    return blended(ground, share, signed)


def number(value: float) -> str:
    """Write a multiple with two or three digits."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    digits = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}".replace("-", "−")


def _share_of_max(end: float) -> str:
    return {1.0: "max", 0.5: "½ max", 0.0: "0", -1.0: "−max"}[end]
