# SPDX-License-Identifier: Apache-2.0
"""What a set of images with instances is: a table opened by number, like any other, with boxes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.decode import DAMAGE, Size, reason
from keymix.data.detection.outlines import (
    FloatArray,
    Outlines,
    RunLengths,
    spans,
)
from keymix.data.kinds import BOXES
from keymix.data.random_parameters import flips
from keymix.data.sources.base import Fault, Source
from keymix.data.sources.folder import Files
from keymix.data.streams import IntArray
from keymix.data.targets import Digest, Target, Targets

SMALL, LARGE = 32**2, 96**2
"""Areas, pixels, below which COCO calls an instance small, and above which large."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Annotations:
    """All that an annotation file says, in flat arrays; annotations are in the order of images.

    Args:
        folder: Where the images are.
        files: The file of each image below the folder; empty where its name is at fault.
        image_ids: The id of each image, int64 ``[N]``.
        sizes: Height and width of each image, int64 ``[N, 2]``.
        first: The first annotation of each image, and the end, int64 ``[N + 1]``.
        ids: The id of each annotation, int64 ``[A]``.
        labels: Class number of each, from 0, int64 ``[A]``.
        boxes: Left, top, width and height of each, pixels, ``[A, 4]``.
        areas: Area of each, pixels, ``[A]``.
        crowd: Whether it is a crowd, ``[A]``.
        outlines: Their outlines.
        category_ids: The id of each class.
        faults: What is wrong with images, by image.
        unfit: The annotations that are unfit, by image: what is wrong with each, by its position,
            or by a number below 0 where it could not be read and has none.
        left_out: What was wrong with each annotation that was left out, by image.
    """

    folder: Path
    files: Sequence[str]
    image_ids: IntArray
    sizes: IntArray
    first: IntArray
    ids: IntArray
    labels: IntArray
    boxes: FloatArray
    areas: FloatArray
    crowd: NDArray[np.bool_]
    outlines: Outlines
    category_ids: tuple[int, ...]
    faults: Mapping[int, Sequence[Fault]] = field(default_factory=dict)
    unfit: Mapping[int, Mapping[int, Sequence[Fault]]] = field(default_factory=dict)
    left_out: Mapping[int, Sequence[Sequence[Fault]]] = field(default_factory=dict)

    def without_unfit(self) -> Annotations:
        """Leave the unfit annotations out; images keep the others, and faults of their own."""
        rows = [(a, row) for row, each in self.unfit.items() for a in each if a >= 0]
        unfit, images = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        counts = np.diff(self.first) - np.bincount(images, minlength=len(self.files))
        kept = self
        if rows:
            kept = replace(
                self,
                first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                ids=np.delete(self.ids, unfit),
                labels=np.delete(self.labels, unfit),
                boxes=np.delete(self.boxes, unfit, axis=0),
                areas=np.delete(self.areas, unfit),
                crowd=np.delete(self.crowd, unfit),
                outlines=self.outlines.without(unfit),
            )
        left_out = {row: tuple(each.values()) for row, each in self.unfit.items()}
        return replace(kept, unfit={}, left_out=left_out)

    def of(self, row: int) -> slice:
        """Return which annotations an image has."""
        return slice(int(self.first[row]), int(self.first[row + 1]))

    def size(self, row: int) -> Size:
        """Return height and width of an image."""
        height, width = self.sizes[row].tolist()
        return height, width


class InstanceTargets(Targets):
    """The instances of images.

    What belongs to an image is a mapping of tensors, as torchvision's detectors take it:

    - ``boxes``: left, top, right and bottom in pixels of the image, float32 ``[n, 4]``,
    - ``labels``: int64 ``[n]`` from 1 on; class ``k`` of the data is ``k + 1``, 0 is background,
    - ``masks``: uint8 ``[n, H, W]``,
    - ``iscrowd``: bool ``[n]``,
    - ``area``: the annotated area in pixels of the image, float32 ``[n]``.

    Args:
        annotations: What the annotation file says.
        rows: The images of it that these are of.
        sizes: Height and width that each image is resized to; None for its own.
    """

    kind = BOXES
    moves = True
    described = "keymix.data.detection.check:describe"

    def __init__(
        self, annotations: Annotations, rows: IntArray, sizes: Sequence[Size] | None = None
    ) -> None:
        self.annotations, self.rows, self.sizes = annotations, rows, sizes

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def category_ids(self) -> tuple[int, ...]:
        """The source's own number of each class."""
        return self.annotations.category_ids

    @property
    def positions(self) -> IntArray:
        """The positions of all annotations of these images."""
        return spans(self.annotations.first, self.rows)

    @property
    def counts(self) -> IntArray:
        """How many annotations each image has."""
        return np.diff(self.annotations.first)[self.rows]

    def image_id(self, i: int) -> int:
        """Return the source's own number of image ``i``."""
        return int(self.annotations.image_ids[self.rows[i]])

    def size(self, i: int) -> Size:
        """Return height and width of image ``i`` before it is resized."""
        return self.annotations.size(int(self.rows[i]))

    def read(self, i: int) -> dict[str, Tensor]:
        """Read the instances of image ``i``, crowds included, at the size of the images."""
        return self.read_at(i, self.size(i) if self.sizes is None else self.sizes[i])

    def read_at(self, i: int, size: Size) -> dict[str, Tensor]:
        """Read the instances of image ``i`` resized to height and width."""
        own = self.size(i)
        down, across = size[0] / own[0], size[1] / own[1]
        x, y, w, h = self._of(i, self.annotations.boxes).T
        sides = (x, y, x + w, y + h)
        scaled = [
            np.clip(side, 0, most) * scale
            for side, most, scale in zip(
                sides, (own[1], own[0]) * 2, (across, down) * 2, strict=True
            )
        ]
        return self._found(i, np.stack(scaled, axis=1), own, size)

    def truth(self, i: int) -> dict[str, Tensor]:
        """Read the instances of image ``i`` at its own size, as they are annotated.

        Returns:
            What `read` gives, with boxes as they stand in the file, and ``size``, height and
            width, int64 ``[2]``.
        """
        own = self.size(i)
        x, y, w, h = self._of(i, self.annotations.boxes).T
        found = self._found(i, np.stack([x, y, x + w, y + h], axis=1), own, own)
        return {**found, "size": torch.tensor(own)}

    def encoded(self, i: int) -> list[RunLengths]:
        """Write the masks of image ``i`` at its own size as COCO's tools take them."""
        span = self.annotations.of(int(self.rows[i]))
        outlines = self.annotations.outlines
        return [outlines.encoded(a, self.size(i)) for a in range(span.start, span.stop)]

    def update_digest(self, digest: Digest) -> None:
        """Enter ids and sizes of the images, and all of their annotations."""
        found = self.annotations
        those = self.positions
        for array in (
            found.image_ids[self.rows],
            found.sizes[self.rows],
            self.counts,
            found.labels[those],
            found.boxes[those],
            found.areas[those],
            found.crowd[those],
            *found.outlines.arrays(those),
        ):
            digest.update(f"{array.shape}\n".encode())
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())

    def select(self, rows: IntArray) -> InstanceTargets:
        """Keep the instances of some images."""
        sizes = None if self.sizes is None else [self.sizes[i] for i in rows.tolist()]
        return InstanceTargets(self.annotations, self.rows[rows], sizes)

    def collate(self, targets: Sequence[Target]) -> list[Target]:
        """List them: images have unequal numbers of instances."""
        return [*targets]

    def content(self, i: int) -> bytes:
        """Return bytes that identify the instances of image ``i``."""
        found = self.annotations
        those = np.arange(len(found.ids), dtype=np.int64)[found.of(int(self.rows[i]))]
        parts = (found.labels[those], found.boxes[those], *found.outlines.arrays(those))
        return b"".join(each.tobytes() for each in parts)

    def resized(self, before: Sequence[Size], after: Sequence[Size]) -> InstanceTargets:
        """Make the instances of images that are resized."""
        del before  # the file says it
        return InstanceTargets(self.annotations, self.rows, after)

    def augmented(
        self, image: Tensor, target: Target, i: int, augment: Augment, *, seed: int, epoch: int
    ) -> tuple[Tensor, Target]:
        """Mirror an image with its boxes and masks."""
        index = np.array([i], dtype=np.int64)
        if not augment.flip or not flips(index, seed=seed, epoch=epoch)[0]:
            return image, target
        assert isinstance(target, dict)
        left, top, right, bottom = target["boxes"].unbind(1)
        width = image.shape[-1]
        boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
        return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}

    def _of(self, i: int, array: NDArray[np.float64]) -> FloatArray:
        found: FloatArray = array[self.annotations.of(int(self.rows[i]))]
        return found

    def _found(self, i: int, boxes: FloatArray, own: Size, size: Size) -> dict[str, Tensor]:
        found, span = self.annotations, self.annotations.of(int(self.rows[i]))
        grown = (size[0] * size[1]) / (own[0] * own[1])
        return {
            "boxes": torch.from_numpy(boxes.astype(np.float32)),
            "labels": torch.from_numpy(found.labels[span] + 1),
            "masks": found.outlines.masks(range(span.start, span.stop), own, size),
            "iscrowd": torch.from_numpy(found.crowd[span].copy()),
            "area": torch.from_numpy((found.areas[span] * grown).astype(np.float32)),
        }


class InstanceTable(Files):
    """Image files with instances.

    Args:
        annotations: What the annotation file says.
        rows: The images of it; None for all.
    """

    def __init__(self, annotations: Annotations, rows: IntArray | None = None) -> None:
        if rows is None:
            rows = np.arange(len(annotations.files), dtype=np.int64)
        self.annotations, self.rows = annotations, rows
        self.instances = InstanceTargets(annotations, rows)
        files = [annotations.files[row] for row in rows.tolist()]
        super().__init__(annotations.folder, files, self.instances)

    def open(self, i: int) -> Image.Image:
        """Open the file, unless its name is at fault."""
        if not self._files[i]:
            raise FileNotFoundError(2, "its name leaves the folder of the images")
        return super().open(i)

    def select(self, rows: IntArray) -> InstanceTable:
        """Keep some images."""
        return InstanceTable(self.annotations, self.rows[rows])

    def size(self, i: int) -> Size:
        """Return height and width of image ``i`` as the annotation file states them."""
        return self.annotations.size(int(self.rows[i]))

    def without_unfit(self) -> InstanceTable:
        """Leave the unfit annotations out."""
        return InstanceTable(self.annotations.without_unfit(), self.rows)

    def stated(self, i: int) -> Sequence[Fault]:
        """List what is wrong with image ``i`` or its annotations in the annotation file."""
        return [*self.annotations.faults.get(int(self.rows[i]), ()), *chain(*self.unfit(i))]

    def unfit(self, i: int) -> Collection[Sequence[Fault]]:
        """List what is wrong with each annotation of image ``i`` that is unfit."""
        return self.annotations.unfit.get(int(self.rows[i]), {}).values()

    def left_out(self) -> list[Sequence[Fault]]:
        """List what was wrong with each annotation of these images that was left out."""
        found = self.annotations.left_out
        return [faults for row in self.rows.tolist() for faults in found.get(row, ())]

    def lost(self, i: int) -> bool:
        """Whether there is no file of image ``i``."""
        return not self._files[i] or not (self._root / self._files[i]).exists()

    def inspect(self, i: int) -> list[Fault]:
        """Find all that is wrong with image ``i``: its entry, its annotations, its header."""
        faults = list(self.stated(i))
        if not self._files[i]:
            return faults
        try:
            with self.open(i) as image:
                size = image.height, image.width
                image.verify()
        except DAMAGE as error:
            return [*faults, self.unreadable(i, error)]
        return [*faults, *self.unlike(i, size)]

    def unreadable(self, i: int, error: Exception) -> Fault:
        """Say that image ``i`` cannot be opened or decoded."""
        if isinstance(error, FileNotFoundError):
            return Fault("missing image", f"{self.name(i)} is missing", self.name(i))
        message = f"cannot read image {self.name(i)}: {reason(error)}"
        return Fault("unreadable image", message, self.name(i))

    def unlike(self, i: int, size: Size) -> list[Fault]:
        """Say that image ``i`` has another size than is stated, if it has."""
        stated = self.size(i)
        if size == stated:
            return []
        message = (
            f"{self.name(i)} has {size[1]}x{size[0]} pixels, and its entry states "
            f"{stated[1]}x{stated[0]}"
        )
        return [Fault("size unlike the entry", message, self.name(i))]


@dataclass(frozen=True, kw_only=True)
class InstanceSource(Source):
    """A source whose tables are `InstanceTable`.

    Args:
        loose: What is wrong with the annotation files, but belongs to no image; training refuses
            it, or goes without those entries if broken images are left out.
    """

    preparation: ClassVar[str] = "keymix.data.detection.inputs:InstancePreparation"
    looked: ClassVar[str] = "keymix.data.detection.check:look_at_instances"

    train: InstanceTable
    val: InstanceTable | None = None
    test: InstanceTable | None = None
    image_size: Size | None = (800, 1333)
    loose: tuple[Fault, ...] = ()
