# SPDX-License-Identifier: Apache-2.0
"""Outlines of instances as COCO stores them: polygons, and run lengths of regions.

All outlines of a set are a few flat arrays, and a mask is made when it is needed, at the size that
is needed. Polygons are filled as COCO's own code does it (``frPyObjects``), run lengths go down the
columns, from the first pixel that does not belong to the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.decode import Size
from keymix.data.streams import IntArray

FloatArray = NDArray[np.float64]

_FIRST, _BITS, _MORE, _SIGN = 48, 5, 32, 16  # of a character of compressed run lengths
_LONGEST = 8  # characters of a number: 40 bits, more than any image has pixels


class RunLengths(TypedDict):
    """A mask as COCO's tools take it: height and width, and compressed run lengths."""

    size: list[int]
    counts: bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class Outlines:
    """The outlines of annotations, by position.

    Args:
        points: Coordinates of all polygons, x and y by turns, in pixels of the image.
        polygons: Where each polygon starts in `points`, and the end, ``[P + 1]``.
        first_polygon: The first polygon of each annotation, and the end, ``[A + 1]``.
        runs: Run lengths of all regions.
        first_run: The first run of each annotation, and the end, ``[A + 1]``.
    """

    points: FloatArray
    polygons: IntArray
    first_polygon: IntArray
    runs: IntArray
    first_run: IntArray

    def is_region(self, a: int) -> bool:
        """Whether annotation ``a`` is run lengths and no polygons."""
        return bool(self.first_run[a + 1] > self.first_run[a])

    def encoded(self, a: int, own: Size, at: Size | None = None) -> RunLengths:
        """Write the mask of annotation ``a`` as COCO's tools take it.

        Args:
            a: The annotation.
            own: Height and width of its image.
            at: Those of the mask, to which polygons are scaled; None for the image's own. Those of
                run lengths are the image's own always.
        """
        from pycocotools import mask

        found: RunLengths
        if self.is_region(a):
            counts = self.runs[self.first_run[a] : self.first_run[a + 1]].tolist()
            found = mask.frPyObjects({"size": list(own), "counts": counts}, *own)
            return found
        height, width = at or own
        scale = np.array([width / own[1], height / own[0]])
        parts = [(points.reshape(-1, 2) * scale).ravel().tolist() for points in self.polygons_of(a)]
        found = mask.merge(mask.frPyObjects(parts, height, width))
        return found

    def masks(self, annotations: Sequence[int], own: Size, at: Size) -> Tensor:
        """Make the masks of annotations of an image, uint8 ``[n, H, W]`` at a size.

        Polygons are scaled before they are filled; regions take the nearest pixel.
        """
        made = torch.zeros((len(annotations), *at), dtype=torch.uint8)
        for k, a in enumerate(annotations):
            if self.is_region(a) and own != at:
                region = torch.zeros(own, dtype=torch.uint8)
                fill(region, self.runs[self.first_run[a] : self.first_run[a + 1]])
                made[k] = F.interpolate(region[None, None], at, mode="nearest-exact")[0, 0]
            elif self.is_region(a):
                fill(made[k], self.runs[self.first_run[a] : self.first_run[a + 1]])
            elif (runs := read_runs(self.encoded(a, own, at)["counts"].decode())) is not None:
                fill(made[k], runs)
        return made

    def polygons_of(self, a: int) -> list[FloatArray]:
        """List the polygons of annotation ``a``, x and y by turns."""
        ends = self.polygons[self.first_polygon[a] : self.first_polygon[a + 1] + 1]
        return [self.points[start:end] for start, end in pairwise(ends.tolist())]

    def without(self, annotations: IntArray) -> Outlines:
        """Leave out those of some annotations; the ones behind them move up."""
        polygons = spans(self.first_polygon, annotations)
        return Outlines(
            points=np.delete(self.points, spans(self.polygons, polygons)),
            polygons=without_spans(self.polygons, polygons),
            first_polygon=without_spans(self.first_polygon, annotations),
            runs=np.delete(self.runs, spans(self.first_run, annotations)),
            first_run=without_spans(self.first_run, annotations),
        )

    def arrays(self, annotations: IntArray) -> Iterable[NDArray[Any]]:
        """Yield what the outlines of annotations consist of, for a hash."""
        polygons = spans(self.first_polygon, annotations)
        yield np.diff(self.first_polygon)[annotations]
        yield np.diff(self.polygons)[polygons]
        yield self.points[spans(self.polygons, polygons)]
        yield np.diff(self.first_run)[annotations]
        yield self.runs[spans(self.first_run, annotations)]


def spans(first: IntArray, chosen: IntArray) -> IntArray:
    """List the positions in chosen spans, which start at ``first``, ``[N + 1]`` with the end."""
    lengths = first[chosen + 1] - first[chosen]
    starts = np.repeat(first[chosen] - np.cumsum(lengths) + lengths, lengths)
    return starts + np.arange(int(lengths.sum()), dtype=np.int64)


def without_spans(first: IntArray, left_out: IntArray) -> IntArray:
    """Return where spans start, ``[N + 1]`` with the end, once some of them are left out."""
    lengths = np.delete(np.diff(first), left_out)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def fill(mask: Tensor, runs: IntArray) -> None:
    """Set the pixels of run lengths in an empty mask ``[H, W]``, in the columns that have some."""
    height = mask.shape[0]
    ends = np.cumsum(runs)
    inside = np.flatnonzero(runs[1::2]) * 2 + 1
    if not len(inside):
        return
    first, last = int(ends[inside[0] - 1]) // height, -(-int(ends[inside[-1]]) // height)
    bounds = np.clip(ends - first * height, 0, (last - first) * height)
    lengths = np.diff(bounds, prepend=0)
    values = np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), lengths)
    filled = np.zeros((last - first) * height, dtype=np.uint8)
    filled[: len(values)] = values
    mask[:, first:last] = torch.from_numpy(filled.reshape(last - first, height).T)


def read_runs(text: str) -> IntArray | None:
    """Read run lengths that COCO compressed; None where the text is none.

    A number is groups of five bits, the lowest first, each a character from ``0`` on; the bit above
    says that more follow, and the highest bit of the last is the sign. From the fourth number on it
    is the difference to the number but one before.
    """
    codes = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64) - _FIRST
    if not len(codes) or codes.min() < 0 or codes.max() >= 2 * _MORE or codes[-1] & _MORE:
        return None
    ends = np.flatnonzero(codes & _MORE == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _LONGEST:
        return None
    place = _BITS * (np.arange(len(codes)) - np.repeat(starts, lengths))
    numbers = np.add.reduceat((codes & (_MORE - 1)) << place, starts)
    numbers[codes[ends] & _SIGN > 0] -= (1 << (_BITS * lengths))[codes[ends] & _SIGN > 0]
    for step in (1, 2):
        numbers[step::2] = np.cumsum(numbers[step::2])
    return numbers
