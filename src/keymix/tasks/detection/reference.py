# SPDX-License-Identifier: Apache-2.0
"""Detections that no network made: the boxes that classes most often have, in every image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keymix.analysis.answers import FloatArray, IntArray
from keymix.data.instances import Instances
from keymix.data.sample import Size
from keymix.tasks.detection.matching import MOST, Found, rectangles

BOXES = 3
"""Boxes of a class at most."""
_ROUNDS = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class FrequentBoxes:
    """Boxes in shares of height and width ``[n, 4]``, with classes and scores ``[n]``."""

    boxes: FloatArray
    labels: IntArray
    scores: FloatArray

    def at(self, size: Size) -> Found:
        """Place the boxes in an image of a size, filled as masks."""
        height, width = size
        boxes = self.boxes * [width, height, width, height]
        masks = rectangles(boxes, size)
        return Found(boxes=boxes, labels=self.labels, masks=masks, scores=self.scores)


def frequent_boxes(images: Sequence[Instances], classes: int) -> FrequentBoxes:
    """Find the typical boxes of each class in training, at most `MOST` of all.

    The boxes of a class, in shares of the image's height and width, are put into at most `BOXES`
    groups by Lloyd's k-means. The mean of a group is a detection, its score the share of the
    training images that the group has boxes for, 1 at most.
    """
    single = ~np.concatenate([each.crowd for each in images])
    x, y, w, h = np.concatenate([each.boxes for each in images])[single].T
    sizes = np.repeat([each.size for each in images], [len(each) for each in images], axis=0)
    down, across = sizes[single].T
    shares = np.stack([x / across, y / down, (x + w) / across, (y + h) / down], axis=1)
    of = np.concatenate([each.labels for each in images])[single]
    parts = [(k, *_groups(shares[of == k])) for k in range(classes) if (of == k).any()]
    labels = np.concatenate([np.full(len(boxes), k + 1) for k, boxes, _ in parts])
    scores = np.concatenate([sizes for *_, sizes in parts]) / max(1, len(images))
    order = np.argsort(-scores, kind="stable")[:MOST]
    boxes = np.concatenate([boxes for _, boxes, _ in parts])
    return FrequentBoxes(
        boxes=boxes[order], labels=labels[order], scores=np.minimum(scores[order], 1.0)
    )


def _groups(boxes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Group boxes ``[n, 4]``: the mean of each group, and how many are in it."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    number = min(BOXES, len(np.unique(boxes, axis=0)))
    spread = np.linspace(0, len(boxes) - 1, 2 * number + 1)[1::2].round().astype(np.int64)
    centres = boxes[np.argsort(area, kind="stable")[spread]]  # small, middle, large
    group = np.zeros(len(boxes), dtype=np.int64)
    for _ in range(_ROUNDS):
        before = group
        group = np.square(boxes[:, None] - centres).sum(axis=2).argmin(axis=1)
        there = np.unique(group)
        centres = np.stack([boxes[group == each].mean(axis=0) for each in there])
        group = np.searchsorted(there, group)
        if np.array_equal(group, before):
            break
    return centres, np.bincount(group, minlength=len(centres)).astype(np.float64)
