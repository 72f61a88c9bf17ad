# SPDX-License-Identifier: Apache-2.0
"""Predicted masks in pictures: the same few test images with the truth and every prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keymix.analysis.mask_pictures import colours_of
from keymix.analysis.overlap import mean_jaccard, overlap_counts
from keymix.data.kinds import IGNORE
from keymix.errors import UserError
from keymix.report.formats import percent
from keymix.report.pictures import PNG, image_uri
from keymix.report.record import ComparisonRecord
from keymix.tasks.segmentation.mask_layers import layer_uri
from keymix.tasks.segmentation.record import (
    Gallery,
    GallerySlice,
    LegendEntry,
    OfPictures,
    PredictedMask,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.data.dataset import ImageData
    from keymix.data.segmentation.table import ScanTable

SIDE = 224
"""At most so many pixels a side has a picture."""


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
    stored = record.own.read(OfPictures).gallery
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


def draw(
    data: ImageData,
    chosen: Sequence[int],
    outputs: Mapping[str, Tensor],
    missing: Mapping[str, str],
    *,
    seed: int,
) -> Gallery:
    """Draw what every mixer's model finds on some test images, next to the truth.

    Args:
        data: The images and masks.
        chosen: Which test images.
        outputs: Each model's logits for them, by label.
        missing: Why a model has none, by label.
        seed: Whose weights they are, for the record.
    """
    from keymix.tasks.segmentation.scoring import predicted_masks

    record = data.record()
    scans, multilabel, scored = scans_of(data), bool(record.multilabel), record.scored_classes
    truth = np.stack([data.test.mask(i).numpy() for i in chosen])
    truths = _planes(truth, scored, multilabel=multilabel)
    ignored = (truth == IGNORE).reshape(len(truth), -1, *truth.shape[-2:]).any(1)
    paint = colours_of(len(scored))
    predictions: dict[str, tuple[PredictedMask, ...]] = {}
    for label, logits in outputs.items():
        found = predicted_masks(logits.float(), multilabel=multilabel).numpy()
        counts = overlap_counts(found, truth, num_classes=len(data.classes), multilabel=multilabel)
        predictions[label] = tuple(
            PredictedMask(
                png=layer_uri(planes, paint, outlines=true, most=SIDE),
                jaccard=round(float(share), 6),
                found=int(pixels[list(scored), 1].sum()),
            )
            for planes, true, share, pixels in zip(
                _planes(found, scored, multilabel=multilabel),
                truths,
                mean_jaccard(counts, scored),
                counts,
                strict=True,
            )
        )
    return Gallery(
        seed=seed,
        size=data.image_size,
        legend=tuple(
            LegendEntry(name=data.classes[c], colour="#{:02x}{:02x}{:02x}".format(*colour))
            for c, colour in zip(scored, paint, strict=True)
        ),
        ignored=bool(ignored.any()),
        slices=tuple(
            GallerySlice(
                id=scans.scan_id(i),
                case=scans.groups[i],
                png=image_uri(data.test.picture(i).numpy(), most=SIDE),
                truth=layer_uri(truths[at], paint, grey=ignored[at], most=SIDE),
                area=int(truths[at].sum()),
            )
            for at, i in enumerate(chosen)
        ),
        predictions=predictions,
        missing=missing,
        names=tuple(scans.scan_id(i) for i in range(len(data.test))),
    )


def scans_of(data: ImageData) -> ScanTable:
    """Return the table of the test images, which names them and their cases."""
    if data.test.scans is None:
        raise ValueError(f"the data {data.spec!r} has no masks")
    return data.test.scans


def _planes(masks: NDArray[Any], scored: Sequence[int], *, multilabel: bool) -> NDArray[np.bool_]:
    """One plane a class that counts, ``[B, C, H, W]``."""
    if multilabel:
        return np.asarray(masks[:, list(scored)] == 1)
    return np.stack([masks == c for c in scored], axis=1)
