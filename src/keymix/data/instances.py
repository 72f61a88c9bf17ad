# SPDX-License-Identifier: Apache-2.0
"""The instances of an image: classes, boxes and outlines, as tensors at the size that is needed.

Masks are made when they are needed, by COCO's own code (``pycocotools``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pycocotools import mask
from torch import Tensor
from torchvision import tv_tensors

from keymix.data.sample import Fault, Size
from keymix.data.streams import IntArray

FloatArray = NDArray[np.float64]
Outline: TypeAlias = "tuple[FloatArray, ...] | bytes"
"""Polygons, x and y by turns in pixels of the image; or compressed run lengths at its own size."""


class RunLengths(TypedDict):
    """A mask as COCO's tools take it: height and width, and compressed run lengths."""

    size: list[int]
    counts: bytes


def read_region(counts: str | Sequence[int], size: Size) -> bytes:
    """Compress run lengths, as COCO writes them; ValueError unless they cover an image's size."""
    pixels = size[0] * size[1]
    if isinstance(counts, str):
        runs: RunLengths = {"size": [*size], "counts": counts.encode()}
    elif sum(counts) != pixels:
        raise ValueError(f"of {sum(counts)} pixels in all, and its image has {pixels}")
    else:
        runs = mask.frPyObjects({"size": [*size], "counts": counts}, *size)
    decoded = mask.decode(runs)
    if np.count_nonzero(decoded) != mask.area(runs):  # they end before the image does
        raise ValueError("that do not cover its image")
    whole: bytes = mask.encode(decoded)["counts"]
    return whole


def encoded(outline: Outline, own: Size, at: Size | None = None) -> RunLengths:
    """Write a mask as COCO's tools take it, of an image's own size or of another.

    Polygons are scaled to it; run lengths stay at the image's own.
    """
    if isinstance(outline, bytes):
        return {"size": [*own], "counts": outline}
    height, width = at or own
    scale = np.array([width / own[1], height / own[0]])
    parts = [(points.reshape(-1, 2) * scale).ravel().tolist() for points in outline]
    found: RunLengths = mask.merge(mask.frPyObjects(parts, height, width))
    return found


def masks_of(outlines: Sequence[Outline], own: Size, at: Size) -> Tensor:
    """Make the masks of an image, uint8 ``[n, H, W]`` at a size.

    Polygons are scaled before they are filled; regions take the nearest pixel.
    """
    made = torch.zeros((len(outlines), *at), dtype=torch.uint8)
    for plane, outline in zip(made, outlines, strict=True):
        runs = encoded(outline, own, at)
        filled = torch.from_numpy(mask.decode(runs))
        if filled.shape != at:
            plane[:] = F.interpolate(filled[None, None], at, mode="nearest-exact")[0, 0]
            continue
        left, top, width, height = map(int, mask.toBbox(runs))
        box = slice(top, top + height), slice(left, left + width)  # the rest is empty
        plane[box] = filled[box]
    return made


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Instances:
    """The instances of an image that are fit, at its own size."""

    image_id: int  # the source's own number of the image
    size: Size
    labels: IntArray  # class number of each instance, from 0, ``[n]``
    boxes: FloatArray  # left, top, width and height of each, pixels, ``[n, 4]``
    areas: FloatArray  # of each, pixels
    crowd: NDArray[np.bool_]  # whether it is a crowd
    outlines: tuple[Outline, ...] | None  # of each; None where the data have boxes alone
    unfit: tuple[Fault, ...] = ()  # what is wrong with each annotation that is unfit

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, size: Size) -> dict[str, Tensor]:
        """Make what torchvision's detectors take of an image that is resized, crowds included.

        - ``boxes``: left, top, right and bottom in pixels of the image, float32 ``[n, 4]``,
        - ``labels``: int64 ``[n]`` from 1 on; class ``k`` of the data is ``k + 1``,
        - ``masks``: uint8 ``[n, H, W]``, where the data have outlines,
        - ``iscrowd``: bool ``[n]``,
        - ``area``: the annotated area in pixels of the image, float32 ``[n]``.
        """
        across, down = size[1] / self.size[1], size[0] / self.size[0]
        inside = np.clip(self._sides(), 0, (self.size[1], self.size[0]) * 2)
        return self._found(inside * ((across, down) * 2), size)

    def truth(self) -> dict[str, Tensor]:
        """Make the same at the image's own size, with boxes as they stand in the file.

        Returns:
            What `at` gives, and ``size``, height and width, int64 ``[2]``.
        """
        return {**self._found(self._sides(), self.size), "size": torch.tensor(self.size)}

    def encoded(self) -> list[RunLengths] | None:
        """Write the masks at the image's own size as COCO's tools take them."""
        if self.outlines is None:
            return None
        return [encoded(outline, self.size) for outline in self.outlines]

    def content(self) -> bytes:
        """Return bytes that identify the instances, whatever image they are of."""
        parts = (self.labels, self.boxes, self.areas, self.crowd, *_arrays(self.outlines or ()))
        return b"".join(each.tobytes() for each in parts)

    def _sides(self) -> FloatArray:
        """Left, top, right and bottom of the boxes as they stand in the file."""
        return np.concatenate([self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]], axis=1)

    def _found(self, boxes: FloatArray, size: Size) -> dict[str, Tensor]:
        grown = (size[0] * size[1]) / (self.size[0] * self.size[1])
        found = {
            "boxes": tv_tensors.BoundingBoxes(
                torch.from_numpy(boxes.astype(np.float32)), format="XYXY", canvas_size=size
            ),
            "labels": torch.from_numpy(self.labels + 1),
            "iscrowd": torch.from_numpy(self.crowd.copy()),
            "area": torch.from_numpy((self.areas * grown).astype(np.float32)),
        }
        if self.outlines is not None:
            found["masks"] = tv_tensors.Mask(masks_of(self.outlines, self.size, size))
        return found


def _arrays(outlines: Sequence[Outline]) -> Iterator[NDArray[Any]]:
    """Yield what outlines consist of, for a hash: polygons and their points, run lengths."""
    each = [() if isinstance(outline, bytes) else outline for outline in outlines]
    regions = [outline if isinstance(outline, bytes) else b"" for outline in outlines]
    points = [polygon for polygons in each for polygon in polygons]
    yield np.array([len(polygons) for polygons in each], dtype=np.int64)
    yield np.array([len(polygon) for polygon in points], dtype=np.int64)
    yield np.concatenate([np.zeros(0), *points])
    yield np.array([len(region) for region in regions], dtype=np.int64)
    yield np.frombuffer(b"".join(regions), dtype=np.uint8)
