# SPDX-License-Identifier: Apache-2.0
"""Outlines of instances as COCO stores them: polygons, and run lengths of regions.

A mask is made when it is needed, at the size that is needed, by COCO's own code (``pycocotools``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pycocotools import mask
from torch import Tensor

from keymix.data.decode import Size

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
