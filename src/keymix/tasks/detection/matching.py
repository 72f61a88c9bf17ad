# SPDX-License-Identifier: Apache-2.0
"""Which detections of an image find which true instances, as COCO counts it.

COCO's rules (https://cocodataset.org/#detection-eval; Lin et al. 2014, arXiv:1405.0312). Detections
of a class are taken from the surest on, at most `MOST` per image and class. Each finds the true
instance of its class that it overlaps most, of those not found yet, if their IoU reaches a
threshold. Instances outside a range of areas, and crowd regions, are ignored: they need not be
found, and a detection that finds one counts neither as right nor as wrong; so does one that finds
nothing and is itself outside the range. The IoU with a crowd region is the share of the detection
that lies in it, and any number of detections may find it.

Run lengths and IoU are pycocotools'. Its own matching, a loop over thresholds, detections and
instances, finds the same and takes up to 16 times as long where classes are few. A test compares
the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_masks

from keymix.analysis.answers import FloatArray, IntArray
from keymix.data.instances import RunLengths

BoolArray = NDArray[np.bool_]
Bits = NDArray[np.uint8]
"""Flags of detections by area and threshold, packed: ``[D, 5]``."""

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""IoU from which on an instance is found: T = 10 of them."""
AREAS: Mapping[str, tuple[float, float]] = {
    "all": (0.0, 1e10),
    "small": (0.0, 32.0**2),
    "medium": (32.0**2, 96.0**2),
    "large": (96.0**2, 1e10),
}
"""Least and largest area of the instances that count, pixels: A = 4 ranges."""
SHAPES = ("box", "mask")
"""What overlaps: boxes, or masks."""
KINDS = ("matched", "ignored")
"""What is said of a detection: that it finds an instance, that it is neither right nor wrong."""
MOST = 100
"""Detections of a class that count per image."""
_RANGES = np.array(list(AREAS.values()))
_NEAR = np.minimum(THRESHOLDS, 1 - 1e-10)
_NONE = np.zeros((len(AREAS), len(THRESHOLDS), 0), dtype=bool)


@dataclass(frozen=True, kw_only=True, eq=False)
class Instances:
    """The true instances of an image, at its own size.

    Shape: boxes ``[n, 4]``, left, top, right, bottom in pixels; labels from 1 on, areas in pixels
    and crowd flags ``[n]``; ``n`` masks, None where the data have boxes alone.
    """

    boxes: FloatArray
    labels: IntArray
    masks: Sequence[RunLengths] | None
    area: FloatArray
    crowd: BoolArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a model detects in an image, at its own size; see `Instances`. Scores are ``[n]``.

    Masks are None of a model that finds boxes alone.
    """

    boxes: FloatArray
    labels: IntArray
    masks: Sequence[RunLengths] | None
    scores: FloatArray

    def chosen(self, rows: IntArray) -> Found:
        """Keep some detections."""
        return Found(
            boxes=self.boxes[rows],
            labels=self.labels[rows],
            masks=None if self.masks is None else [self.masks[i] for i in rows],
            scores=self.scores[rows],
        )


def encoded(masks: NDArray[np.uint8]) -> list[RunLengths]:
    """Encode masks ``[n, h, w]`` of 0 and 1 as run lengths."""
    if not len(masks):
        return []
    columns = np.asfortranarray(masks.transpose(1, 2, 0))
    return list(coco_masks.encode(columns))


def decoded(runs: Sequence[RunLengths], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Decode run lengths to masks ``[n, h, w]`` of 0 and 1."""
    if not runs:
        return np.zeros((0, *size), dtype=np.uint8)
    masks: NDArray[np.uint8] = np.asarray(coco_masks.decode(list(runs))).transpose(2, 0, 1)
    return masks


def rectangles(boxes: FloatArray, size: tuple[int, int]) -> list[RunLengths]:
    """Encode filled boxes as the masks of an image of a size."""
    return list(coco_masks.frPyObjects(wide(boxes), *size)) if len(boxes) else []


def wide(boxes: FloatArray) -> FloatArray:
    """Convert left, top, right, bottom to left, top, width, height: ``[n, 4]``."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def matched(truth: Instances, found: Found) -> tuple[Found, dict[str, Bits]]:
    """Match the detections of an image, class by class, with its true instances.

    Gives the detections that count, and of each shape, as ``box_matched`` and ``box_ignored``,
    whether they find an instance, and whether they count neither as right nor as wrong; of masks
    where both have them.
    """
    ours = wide(found.boxes)
    shapes = {  # what is found, what is true, and the areas of what is found
        "box": (ours, wide(truth.boxes), ours[:, 2] * ours[:, 3])
    }
    if found.masks is not None and truth.masks is not None:
        areas = coco_masks.area([*found.masks])
        shapes["mask"] = (np.array(found.masks), np.array(truth.masks), areas)
    kept = [np.zeros(0, dtype=np.int64)]
    bits = {f"{shape}_{kind}": [packed(_NONE)] for shape in shapes for kind in KINDS}
    for label in np.unique(found.labels):
        mine = np.flatnonzero(found.labels == label)
        mine = mine[np.argsort(-found.scores[mine], kind="stable")][:MOST]
        theirs = np.flatnonzero(truth.labels == label)
        crowd = truth.crowd[theirs]
        unwanted = _outside(truth.area[theirs]) | crowd
        kept.append(mine)
        for shape, (said, true, areas) in shapes.items():
            pair = (said[mine].tolist(), true[theirs].tolist(), crowd.astype(int).tolist())
            overlaps = coco_masks.iou(*pair) if len(theirs) else np.zeros((len(mine), 0))
            flags = _matches(overlaps, unwanted, crowd, _outside(areas[mine]))
            for kind, each in zip(KINDS, flags, strict=True):
                bits[f"{shape}_{kind}"].append(packed(each))
    joined = {name: np.concatenate(parts) for name, parts in bits.items()}
    return found.chosen(np.concatenate(kept)), joined


def _outside(areas: FloatArray) -> BoolArray:
    """Whether areas are outside each range: ``[n]`` -> ``[A, n]``."""
    return (areas < _RANGES[:, :1]) | (areas > _RANGES[:, 1:])


def _matches(
    overlaps: FloatArray, unwanted: BoolArray, crowd: BoolArray, outside: BoolArray
) -> tuple[BoolArray, BoolArray]:
    """Say which detections of a class find an instance, and which are ignored.

    Shape: IoU ``[D, G]``, the surest first; unwanted instances ``[A, G]``, crowds ``[G]`` and
    detections outside a range ``[A, D]`` -> twice ``[A, T, D]``.
    """
    ranges, detections = outside.shape
    shape = (ranges, len(_NEAR), detections)
    hits, ignored = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    free = np.ones((*shape[:2], len(crowd)), dtype=bool)
    wanted, last = ~unwanted[:, None], len(crowd) - 1
    for d in np.flatnonzero(overlaps.max(axis=1, initial=0.0) >= _NEAR[0]):
        near = (overlaps[d] >= _NEAR[:, None]) & (free | crowd)
        first = near & wanted
        choice = np.where(first.any(axis=-1, keepdims=True), first, near)
        best = last - np.where(choice, overlaps[d], -1.0)[..., ::-1].argmax(axis=-1)  # last of ties
        hit = choice.any(axis=-1)
        hits[..., d] = hit
        ignored[..., d] = hit & np.take_along_axis(unwanted, best, axis=1)
        area, threshold = np.nonzero(hit)
        free[area, threshold, best[hit]] = False
    return hits, ignored | (~hits & outside[:, None])


def packed(flags: BoolArray) -> Bits:
    """Pack flags by area and threshold: ``[A, T, D]`` -> ``[D, 5]``."""
    return np.packbits(flags.reshape(len(AREAS) * len(THRESHOLDS), -1).T, axis=1)


def unpacked(bits: Bits, area: str) -> BoolArray:
    """Read the flags of a range of areas: ``[D, 5]`` -> ``[T, D]``."""
    first = list(AREAS).index(area) * len(THRESHOLDS)
    found: BoolArray = np.unpackbits(bits, axis=1)[:, first : first + len(THRESHOLDS)].T == 1
    return found
