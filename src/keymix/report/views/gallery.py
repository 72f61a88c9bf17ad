# SPDX-License-Identifier: Apache-2.0
"""Predicted masks on the page: the same few test images with the truth and every prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keymix.errors import UserError
from keymix.report.formats import percent
from keymix.report.record import ComparisonRecord, GallerySlice, LegendEntry, PredictedMask
from keymix.report.views.attention import PNG


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A predicted mask, and how good it is in words."""

    png: str
    told: str


@dataclass(frozen=True, kw_only=True)
class MaskRow:
    """A mixer's masks of all images, or the reason why there are none."""

    mixer: str
    cells: list[Cell]
    missing: str | None


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The sheet of masks: a column an image, a row the truth and each mixer.

    Args:
        slices: The images.
        legend: The classes.
        ignored: Whether there are pixels that count nowhere.
        seed: Whose weights they are.
        size: Height and width in pixels.
        distinct: Whether no two of the images that have something are of one case.
        rows: The mixers.
    """

    slices: tuple[GallerySlice, ...]
    legend: tuple[LegendEntry, ...]
    ignored: bool
    seed: int
    size: tuple[int, int]
    distinct: bool
    rows: list[MaskRow]


def sheet(record: ComparisonRecord) -> Sheet | None:
    """Make the sheet of masks; ``None`` without pictures.

    Raises:
        UserError: If a picture of the record is no PNG data URI.
    """
    stored = record.gallery
    if not stored or not stored.slices:
        return None
    slices = stored.slices
    pictures = [uri for each in slices for uri in (each.png, each.truth)]
    pictures += [cell.png for cells in stored.predictions.values() for cell in cells]
    if not all(PNG.fullmatch(uri) for uri in pictures):
        raise UserError("a picture of the record's gallery is no PNG data URI")
    rows = []
    for label in record.labels:
        if label in stored.predictions:
            cells = [
                Cell(png=cell.png, told=_told(each, cell))
                for each, cell in zip(slices, stored.predictions[label], strict=True)
            ]
            rows.append(MaskRow(mixer=label, cells=cells, missing=None))
        elif label in stored.missing:
            rows.append(MaskRow(mixer=label, cells=[], missing=stored.missing[label]))
    return Sheet(
        slices=slices,
        legend=stored.legend,
        ignored=stored.ignored,
        seed=stored.seed,
        size=stored.size,
        distinct=_distinct([each.case for each in slices if each.area]),
        rows=rows,
    )


def _distinct(cases: Sequence[str]) -> bool:
    return len(set(cases)) == len(cases)


def _told(each: GallerySlice, cell: PredictedMask) -> str:
    """Say under a prediction how good it is."""
    if each.area:
        return f"Jaccard {percent(cell.jaccard)}\u00a0%"
    if not cell.found:
        return "rightly nothing"
    pixels = "pixel" if cell.found == 1 else "pixels"
    return f"{cell.found:,} {pixels} where nothing is"
