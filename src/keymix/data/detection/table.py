# SPDX-License-Identifier: Apache-2.0
"""What a set of images with instances is: a table opened by number, like any other, with boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.decode import DAMAGE, Size, reason, refuse_turned
from keymix.data.detection.outlines import FloatArray, Outline, RunLengths, encoded, masks_of
from keymix.data.kinds import BOXES
from keymix.data.random_parameters import flips
from keymix.data.sources.base import Fault, Source
from keymix.data.sources.folder import Files
from keymix.data.streams import IntArray
from keymix.data.targets import Digest, Target, Targets

SMALL, LARGE = 32**2, 96**2
"""Areas, pixels, below which COCO calls an instance small, and above which large."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Annotated:
    """An image of an annotation file, with its annotations that are fit."""

    id: int
    file: str  # below the folder of images
    size: Size
    labels: IntArray  # class number of each instance, from 0, ``[n]``
    boxes: FloatArray  # left, top, width and height of each, pixels, ``[n, 4]``
    areas: FloatArray  # of each, pixels
    crowd: NDArray[np.bool_]  # whether it is a crowd
    outlines: tuple[Outline, ...]  # of each; none where the data have boxes alone
    unfit: tuple[Fault, ...]  # what is wrong with each annotation that is unfit


@dataclass(frozen=True, eq=False, kw_only=True)
class Annotations:
    """Images of an annotation file.

    Args:
        images: The images.
        category_ids: The source's own number of each class.
        outlined: Whether instances have outlines; else boxes alone.
    """

    images: Sequence[Annotated]
    category_ids: tuple[int, ...]
    outlined: bool

    def select(self, rows: IntArray) -> Annotations:
        """Keep some images."""
        images = [self.images[i] for i in rows.tolist()]
        return Annotations(images=images, category_ids=self.category_ids, outlined=self.outlined)

    def joined(self, name: str) -> NDArray[Any]:
        """Join what the instances of all images are: ``labels``, ``boxes``, ``areas``, ``crowd``.

        Of ``id`` and ``size`` there is one for each image.
        """
        parts = [getattr(each, name) for each in self.images]
        return np.array(parts) if name in ("id", "size") else np.concatenate(parts)

    @property
    def counts(self) -> IntArray:
        """How many annotations each image has."""
        return np.array([len(each.labels) for each in self.images], dtype=np.int64)


class InstanceTargets(Targets):
    """The instances of images.

    What belongs to an image is a mapping of tensors, as torchvision's detectors take it:

    - ``boxes``: left, top, right and bottom in pixels of the image, float32 ``[n, 4]``,
    - ``labels``: int64 ``[n]`` from 1 on; class ``k`` of the data is ``k + 1``, 0 is background,
    - ``masks``: uint8 ``[n, H, W]``, where the data have outlines,
    - ``iscrowd``: bool ``[n]``,
    - ``area``: the annotated area in pixels of the image, float32 ``[n]``.

    Args:
        annotations: What the annotation file says of them.
        sizes: Height and width that each image is resized to; None for its own.
    """

    kind = BOXES
    moves = True
    described = "keymix.data.detection.check:describe"

    def __init__(self, annotations: Annotations, sizes: Sequence[Size] | None = None) -> None:
        self.annotations, self.sizes = annotations, sizes

    def __len__(self) -> int:
        return len(self.annotations.images)

    @property
    def category_ids(self) -> tuple[int, ...]:
        """The source's own number of each class."""
        return self.annotations.category_ids

    def image_id(self, i: int) -> int:
        """Return the source's own number of image ``i``."""
        return self.annotations.images[i].id

    def size(self, i: int) -> Size:
        """Return height and width of image ``i`` before it is resized."""
        return self.annotations.images[i].size

    def read(self, i: int) -> dict[str, Tensor]:
        """Read the instances of image ``i``, crowds included, at the size of the images."""
        return self.read_at(i, self.size(i) if self.sizes is None else self.sizes[i])

    def read_at(self, i: int, size: Size) -> dict[str, Tensor]:
        """Read the instances of image ``i`` resized to height and width."""
        own = self.size(i)
        across, down = size[1] / own[1], size[0] / own[0]
        sides = np.clip(self._sides(i), 0, (own[1], own[0]) * 2) * ((across, down) * 2)
        return self._found(i, sides, size)

    def truth(self, i: int) -> dict[str, Tensor]:
        """Read the instances of image ``i`` at its own size, as they are annotated.

        Returns:
            What `read` gives, with boxes as they stand in the file, and ``size``, height and
            width, int64 ``[2]``.
        """
        own = self.size(i)
        return {**self._found(i, self._sides(i), own), "size": torch.tensor(own)}

    def encoded(self, i: int) -> list[RunLengths] | None:
        """Write the masks of image ``i`` at its own size as COCO's tools take them."""
        if not self.annotations.outlined:
            return None
        image = self.annotations.images[i]
        return [encoded(outline, image.size) for outline in image.outlines]

    def update_digest(self, digest: Digest) -> None:
        """Enter ids and sizes of the images, and all of their annotations."""
        found = self.annotations
        outlines = [outline for image in found.images for outline in image.outlines]
        for array in (
            found.joined("id"),
            found.joined("size"),
            found.counts,
            *(found.joined(name) for name in ("labels", "boxes", "areas", "crowd")),
            *_arrays(outlines),
        ):
            digest.update(f"{array.shape}\n".encode())
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())

    def select(self, rows: IntArray) -> InstanceTargets:
        """Keep the instances of some images."""
        sizes = None if self.sizes is None else [self.sizes[i] for i in rows.tolist()]
        return InstanceTargets(self.annotations.select(rows), sizes)

    def collate(self, targets: Sequence[Target]) -> list[Target]:
        """List them: images have unequal numbers of instances."""
        return [*targets]

    def content(self, i: int) -> bytes:
        """Return bytes that identify the instances of image ``i``."""
        image = self.annotations.images[i]
        parts = (image.labels, image.boxes, *_arrays(image.outlines))
        return b"".join(each.tobytes() for each in parts)

    def resized(self, before: Sequence[Size], after: Sequence[Size]) -> InstanceTargets:
        """Make the instances of images that are resized."""
        del before  # the file says it
        return InstanceTargets(self.annotations, after)

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
        mirrored = {"boxes": torch.stack([width - right, top, width - left, bottom], dim=1)}
        if "masks" in target:
            mirrored["masks"] = target["masks"].flip(-1)
        return image.flip(-1), {**target, **mirrored}

    def _sides(self, i: int) -> FloatArray:
        """Left, top, right and bottom of the boxes of image ``i`` as they stand in the file."""
        boxes = self.annotations.images[i].boxes
        return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)

    def _found(self, i: int, boxes: FloatArray, size: Size) -> dict[str, Tensor]:
        image = self.annotations.images[i]
        grown = (size[0] * size[1]) / (image.size[0] * image.size[1])
        found = {
            "boxes": torch.from_numpy(boxes.astype(np.float32)),
            "labels": torch.from_numpy(image.labels + 1),
            "iscrowd": torch.from_numpy(image.crowd.copy()),
            "area": torch.from_numpy((image.areas * grown).astype(np.float32)),
        }
        if self.annotations.outlined:
            found["masks"] = masks_of(image.outlines, image.size, size)
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


class InstanceTable(Files):
    """Image files with instances.

    Args:
        folder: Where the images are.
        annotations: What the annotation file says of them.
    """

    def __init__(self, folder: Path, annotations: Annotations) -> None:
        self.annotations, self.instances = annotations, InstanceTargets(annotations)
        super().__init__(folder, [image.file for image in annotations.images], self.instances)

    def open(self, i: int) -> Image.Image:
        """Open the file, unless EXIF turns it: its boxes would not turn along."""
        image = super().open(i)
        refuse_turned(image, self.name(i))
        return image

    def select(self, rows: IntArray) -> InstanceTable:
        """Keep some images."""
        return InstanceTable(self._root, self.annotations.select(rows))

    def unfit(self, i: int) -> Sequence[Fault]:
        """List what is wrong with each annotation of image ``i`` that is unfit."""
        return self.annotations.images[i].unfit

    def inspect(self, i: int) -> list[Fault]:
        """Find what is wrong with image ``i`` by its header."""
        try:
            with self.open(i) as image:
                size = image.height, image.width
                image.verify()
        except DAMAGE as error:
            message = f"cannot read image {self.name(i)}: {reason(error)}"
            return [Fault("unreadable", message, self.name(i))]
        return self.unlike(i, size)

    def unlike(self, i: int, size: Size) -> list[Fault]:
        """Say that image ``i`` has another size than is stated, if it has."""
        stated = self.instances.size(i)
        if size == stated:
            return []
        message = (
            f"{self.name(i)} has {size[1]}x{size[0]} pixels, and its entry states "
            f"{stated[1]}x{stated[0]}"
        )
        return [Fault("wrong size", message, self.name(i))]


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
