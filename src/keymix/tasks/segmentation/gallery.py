# SPDX-License-Identifier: Apache-2.0
"""Predicted masks in pictures: the same few test images with the truth and every prediction.

A mask is a transparent picture over an image, which the page then contains only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.analysis.mask_pictures import GREY, Colour, colours_of, rim
from keymix.analysis.overlap import mean_jaccard, overlap_counts
from keymix.data.kinds import IGNORE
from keymix.report.formats import percent
from keymix.report.part import ImageOutputs
from keymix.report.pictures import check_pictures, hex_colour, image_uri, png_uri
from keymix.report.record import ComparisonRecord, Sparse

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.data.segmentation.table import ScanTable

BoolArray = NDArray[np.bool_]

SIDE = 224
"""Most pixels per side of a picture."""
WHITE: Colour = (255, 255, 255)
FILL, GROUND = 120, 170
"""Opacity of a class and of ignored pixels, of 255."""


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """A class of masks and its colour, ``#rrggbb``."""

    name: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class GallerySlice:
    """A test image with its true mask, both data URIs; ``area`` counts true pixels."""

    id: str
    case: str
    png: str
    truth: str
    area: int


@dataclass(frozen=True, kw_only=True)
class PredictedMask:
    """A predicted mask, a PNG data URI, its Jaccard index on the image, and its pixels."""

    png: str
    jaccard: float
    found: int


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """What the models of a seed find on the same few test images.

    `size` is height and width in pixels, `ignored` whether some pixels count nowhere.
    `predictions`, or why they are `missing`, are by mixer's label; `names` are of all test images.
    """

    seed: int
    size: tuple[int, int]
    legend: tuple[LegendEntry, ...]
    ignored: bool
    slices: tuple[GallerySlice, ...]
    predictions: Mapping[str, tuple[PredictedMask, ...]]
    missing: Mapping[str, str]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OfPictures(Sparse):
    """What is kept of the models' answers in pictures."""

    gallery: Gallery | None = None


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The gallery as a sheet: a column for each image, a row for the truth and each mixer.

    `distinct` says that no two of the images that have something are of one case; `qualities` say
    of each predicted mask, by mixer's label, how good it is.
    """

    stored: Gallery
    distinct: bool
    qualities: Mapping[str, list[str]]


def sheet(record: ComparisonRecord) -> Sheet | None:
    """Make the sheet of masks; None without pictures. Only data URIs of images are taken."""
    stored = record.own.read(OfPictures).gallery
    if not stored or not stored.slices:
        return None
    slices = stored.slices
    pictures = [uri for each in slices for uri in (each.png, each.truth)]
    pictures += [cell.png for cells in stored.predictions.values() for cell in cells]
    check_pictures(pictures)
    qualities = {
        label: [_quality(each, mask) for each, mask in zip(slices, masks, strict=True)]
        for label, masks in stored.predictions.items()
    }
    cases = [each.case for each in slices if each.area]
    return Sheet(stored=stored, distinct=len(set(cases)) == len(cases), qualities=qualities)


def _quality(each: GallerySlice, mask: PredictedMask) -> str:
    """Say under a prediction how good it is."""
    if each.area:
        return f"IoU {percent(mask.jaccard)}\u00a0%"
    if not mask.found:
        return "rightly nothing"
    pixels = "pixel" if mask.found == 1 else "pixels"
    return f"{mask.found:,} {pixels} where nothing is"


def draw(data: ImageData, given: ImageOutputs) -> Gallery:
    """Draw what each mixer's logits find on some test images, next to the truth."""
    from keymix.tasks.segmentation.scoring import predicted_masks

    record = data.record()
    scans, multilabel, scored = scans_of(data), bool(record.multilabel), record.scored_classes
    truth = np.stack([data.test.mask(i).numpy() for i in given.chosen])
    truths = _planes(truth, scored, multilabel=multilabel)
    ignored = (truth == IGNORE).reshape(len(truth), -1, *truth.shape[-2:]).any(1)
    paint = colours_of(len(scored))
    predictions: dict[str, tuple[PredictedMask, ...]] = {}
    for label, logits in given.outputs.items():
        found = predicted_masks(logits.float(), multilabel=multilabel).numpy()
        counts = overlap_counts(found, truth, num_classes=len(data.classes), multilabel=multilabel)
        predictions[label] = tuple(
            PredictedMask(
                png=layer_uri(planes, paint, outlines=true),
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
        seed=given.seed,
        size=data.image_size,
        legend=tuple(
            LegendEntry(name=data.classes[c], colour=hex_colour(colour))
            for c, colour in zip(scored, paint, strict=True)
        ),
        ignored=bool(ignored.any()),
        slices=tuple(
            GallerySlice(
                id=scans.scan_id(i),
                case=scans.groups[i],
                png=image_uri(data.test.picture(i).numpy(), most=SIDE),
                truth=layer_uri(truths[at], paint, grey=ignored[at]),
                area=int(truths[at].sum()),
            )
            for at, i in enumerate(given.chosen)
        ),
        predictions=predictions,
        missing=given.missing,
        names=tuple(scans.scan_id(i) for i in range(len(data.test))),
    )


def layer_uri(
    planes: BoolArray,
    paint: Sequence[Colour],
    *,
    outlines: BoolArray | None = None,
    grey: BoolArray | None = None,
    most: int = SIDE,
) -> str:
    """Encode masks as one transparent PNG: each class filled, its rim opaque.

    Of several classes at a pixel the last is drawn. The rims of ``outlines`` come on top, in white;
    ``grey`` are pixels that count nowhere. Larger pictures than ``most`` lose rows and columns.

    Shape: ``[C, H, W]`` for masks and outlines, ``[H, W]`` for grey.
    """
    step = -(-max(planes.shape[-2:]) // most)
    planes = planes[:, ::step, ::step]
    rgba = np.zeros((*planes.shape[1:], 4), dtype=np.uint8)
    if grey is not None:
        rgba[grey[::step, ::step]] = (*GREY, GROUND)
    for plane, colour in zip(planes, paint, strict=True):
        rgba[plane] = (*colour, FILL)
    for plane, colour in zip(planes, paint, strict=True):
        rgba[rim(plane)] = (*colour, 255)
    if outlines is not None:
        for plane in outlines[:, ::step, ::step]:
            rgba[rim(plane)] = (*WHITE, 255)
    return png_uri(Image.fromarray(rgba))


def scans_of(data: ImageData) -> ScanTable:
    """Return the table of the test images, which names them and their cases."""
    if data.test.scans is None:
        raise ValueError(f"the data {data.spec!r} has no masks")
    return data.test.scans


def _planes(masks: NDArray[Any], scored: Sequence[int], *, multilabel: bool) -> BoolArray:
    """One plane per class that counts, ``[B, C, H, W]``."""
    if multilabel:
        return np.asarray(masks[:, list(scored)] == 1)
    return np.stack([masks == c for c in scored], axis=1)
