# SPDX-License-Identifier: Apache-2.0
"""Which detections of an image find which true instances, as COCO counts it.

COCO's rules (https://cocodataset.org/#detection-eval; Lin et al. 2014, arXiv:1405.0312). Detections
of a class are taken from the surest on, at most `MOST` per image and class. Each finds the true
instance of its class that it overlaps most, of those not found yet, if their IoU reaches a
threshold. Instances outside a range of areas, and crowd regions, are ignored: they need not be
found, and a detection that finds one counts neither as right nor as wrong; so does one that finds
nothing and is itself outside the range. The IoU with a crowd region is the share of the detection
that lies in it, and any number of detections may find it.

Run lengths and IoU are faster-coco-eval's. Its matches are not readable from Python, so they are
made here; a test compares the scores with its own and with those of pycocotools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from faster_coco_eval.core import mask as coco_masks
from numpy.typing import NDArray

from keymix.analysis.answers import FloatArray, IntArray
from keymix.data.detection.outlines import RunLengths

BoolArray = NDArray[np.bool_]
Bits = NDArray[np.uint64]

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
MOST = 100
"""Detections of a class that count per image."""
_RANGES = np.array(list(AREAS.values()))
_NEAR = np.minimum(THRESHOLDS, 1 - 1e-10)
_PLACES = np.arange(_RANGES.shape[0] * len(THRESHOLDS), dtype=np.uint64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Instances:
    """The true instances of an image, at its own size.

    Shape: boxes ``[n, 4]``, left, top, right, bottom in pixels; labels from 1 on, areas in pixels
    and crowd flags ``[n]``; ``n`` masks.
    """

    boxes: FloatArray
    labels: IntArray
    masks: Sequence[RunLengths]
    area: FloatArray
    crowd: BoolArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a model detects in an image, at its own size; see `Instances`. Scores are ``[n]``."""

    boxes: FloatArray
    labels: IntArray
    masks: Sequence[RunLengths]
    scores: FloatArray

    def chosen(self, rows: IntArray) -> Found:
        """Keep some detections."""
        return Found(
            boxes=self.boxes[rows],
            labels=self.labels[rows],
            masks=[self.masks[i] for i in rows],
            scores=self.scores[rows],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Matched:
    """The detections of an image that count, with `packed` bits by area and threshold.

    `matched` and `ignored` are by shape: whether a detection finds an instance, and whether it
    counts neither as right nor as wrong.
    """

    found: Found
    matched: Mapping[str, Bits]
    ignored: Mapping[str, Bits]


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


def matched(truth: Instances, found: Found) -> Matched:
    """Match the detections of an image, class by class, with its true instances."""
    kept: list[IntArray] = []
    bits: dict[str, list[tuple[Bits, Bits]]] = {shape: [] for shape in SHAPES}
    for label in np.unique(found.labels):
        mine = np.flatnonzero(found.labels == label)
        mine = mine[np.argsort(-found.scores[mine], kind="stable")][:MOST]
        theirs = np.flatnonzero(truth.labels == label)
        area = truth.area[theirs]
        unwanted = _outside(area) | truth.crowd[theirs]
        kept.append(mine)
        for shape, overlaps, areas in _overlaps(truth, found, mine, theirs):
            hit, ignored = _matches(overlaps, unwanted, truth.crowd[theirs], _outside(areas))
            bits[shape].append((packed(hit), packed(ignored)))
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *kept])
    none = np.zeros(0, dtype=np.uint64)
    return Matched(
        found=found.chosen(rows),
        matched={s: np.concatenate([none, *(hit for hit, _ in bits[s])]) for s in SHAPES},
        ignored={s: np.concatenate([none, *(out for _, out in bits[s])]) for s in SHAPES},
    )


def _overlaps(
    truth: Instances, found: Found, mine: IntArray, theirs: IntArray
) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """Yield for boxes and for masks the IoU ``[D, G]`` and the areas of detections ``[D]``.

    A detection's area is that of its own shape: of its mask, where masks are matched.
    """
    crowd = truth.crowd[theirs].astype(int).tolist()
    ours, wanted = wide(found.boxes[mine]), wide(truth.boxes[theirs])
    masks = [found.masks[i] for i in mine]
    areas = {"box": ours[:, 2] * ours[:, 3], "mask": np.array(coco_masks.area(masks), dtype=float)}
    if not len(theirs):
        for shape in SHAPES:
            yield shape, np.zeros((len(mine), 0)), areas[shape]
        return
    yield "box", np.asarray(coco_masks.iou(ours, wanted, crowd)), areas["box"]
    true = [truth.masks[i] for i in theirs]
    yield "mask", np.asarray(coco_masks.iou(masks, true, crowd)), areas["mask"]


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
    """Pack flags by area and threshold into a number each: ``[A, T, D]`` -> ``[D]``."""
    numbers = flags.reshape(len(_PLACES), -1).astype(np.uint64) << _PLACES[:, None]
    found: Bits = np.bitwise_or.reduce(numbers, axis=0)
    return found


def unpacked(bits: Bits, area: str) -> BoolArray:
    """Read the flags of a range of areas: ``[D]`` -> ``[T, D]``."""
    first = list(AREAS).index(area) * len(THRESHOLDS)
    places = _PLACES[first : first + len(THRESHOLDS), None]
    found: BoolArray = (bits >> places) & np.uint64(1) == 1
    return found
