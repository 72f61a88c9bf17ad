# SPDX-License-Identifier: Apache-2.0
"""The inputs of a split, by position: how each is read, pictured, hashed and made into batches.

Images are in memory, read one by one, or whole: resized without a crop or at their own sizes, with
targets that move along.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.decode import (
    Size,
    convert,
    evaluation_array,
    fitted_size,
    one_colour,
    reading,
    resize,
    resized_image,
    to_array,
)
from keymix.data.events.cache import Frames
from keymix.data.files import in_chunks
from keymix.data.kinds import IMAGE, InputKind
from keymix.data.rand_augment import AutoAugment, RandAugment, plans
from keymix.data.random_parameters import erased_boxes, flips, resized_crop, short_side
from keymix.data.sources.base import REMEDY, Table
from keymix.data.splits import is_large, sample
from keymix.data.streams import IntArray
from keymix.data.targets import Batched, Digest, Target, Targets
from keymix.errors import UserError

Order: TypeAlias = tuple[int, IntArray]  # epoch, positions in the split
Statistics = tuple[tuple[float, ...], tuple[float, ...], str]
"""Mean and deviation of each channel, and in words of which inputs they are."""
HASHED = (
    "pixels and {targets}",
    "length and first 64 KiB of the encoded images, and {targets}",
    "name and length of all image files, 64 KiB of a fixed sample of 2,000 a split, {targets}",
)
"""What of images enters the fingerprint of a set, from the strictest to the loosest."""
CPU = torch.device("cpu")
_SIDE = 64  # pixels per side from which a JPEG file may be decoded smaller
_CHANNEL_CHUNK = 1 << 24  # pixels counted at once


class Made(NamedTuple):
    """A batch on the device, before it is normalised."""

    # uint8 ``[B, C, H, W]``; frames ``[B, T, C, H, W]``; or a list of images
    pixels: Tensor | list[Tensor]
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    boxes: Tensor | None  # rectangles to erase, int64 ``[B, 4]``; None for none
    # the targets, where they were read with their inputs
    targets: Batched | None = None


class Inputs(ABC):
    """The inputs of a split, by position."""

    kind: InputKind = IMAGE
    listed: bool = False
    """Whether a batch is a list of images, each of its own size."""
    images: Tensor | None = None
    """All pixels, uint8 ``[N, C, H, W]``, where they are in memory."""
    frames: Frames | None = None
    """The frames of the whole set, where inputs are recordings of events."""

    def __init__(
        self, table: Table, image_size: Size, in_chans: int, crop_pct: float = 1.0
    ) -> None:
        self.table = table
        self.image_size, self.in_chans, self.crop_pct = image_size, in_chans, crop_pct

    def __len__(self) -> int:
        return len(self.table)

    @abstractmethod
    def read(self, i: int) -> Tensor:
        """Read input ``i`` as evaluation sees it, uint8 ``[C, H, W]``."""

    def batch(self, index: IntArray) -> Tensor:
        """Read the inputs at some positions."""
        return torch.stack([self.read(i) for i in index.tolist()])

    def make(self, order: Order, targets: Targets, augment: Augment | None, seed: int) -> Made:
        """Read a batch together with its targets, so that what moves an input moves its target.

        It is a function of what is given, so that workers with copies make the same batches.
        """
        epoch, index = order
        pairs = []
        for i in index.tolist():
            image, target = self.pair(i, targets, augment, seed=seed, epoch=epoch)
            if augment is not None:
                image, target = targets.augmented(image, target, i, augment, seed=seed, epoch=epoch)
            pairs.append((image.as_subclass(Tensor), target))
        images = [image for image, _ in pairs]
        pixels = images if self.listed else channels_last(torch.stack(images))
        return Made(pixels, torch.from_numpy(index), None, targets.collate([t for _, t in pairs]))

    def pair(
        self, i: int, targets: Targets, augment: Augment | None, *, seed: int, epoch: int
    ) -> tuple[Tensor, Target]:
        """Read input ``i`` and its target at the size that it has in an epoch."""
        del augment, seed, epoch
        return self.read(i), targets.read(i)

    def refuse(self, augment: Augment) -> None:
        """Refuse augmentation that such inputs do not take."""
        del augment

    def picture(self, i: int) -> Tensor:
        """Read input ``i`` for a person to look at, uint8 ``[C, H, W]``."""
        return self.read(i)

    def decoded(self, i: int) -> Image.Image:
        """Decode image ``i`` at its own size, for transforms that crop before they resize."""
        with reading(self.table.name(i), REMEDY), self.table.open(i) as image:
            return convert(image, self.in_chans, self.table.white_level)

    @property
    def quick(self) -> bool:
        """Whether all can be looked at in no time."""
        return self.images is not None

    @property
    def drafted(self) -> bool:
        """Whether a first look is at fewer pixels, so that equal inputs need a second one."""
        return False

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Return bytes that identify input ``i``, and say whether it is of one colour."""
        del whole
        found = self.read(i)
        flat = found.flatten(1)
        blank = bool((flat == flat[:, :1]).all())
        return f"{tuple(found.shape)}".encode() + found.numpy().tobytes(), blank

    def update_digest(self, digest: Digest) -> str:
        """Enter the inputs into the fingerprint of the data, and say what of them is hashed."""
        if self.images is not None:
            digest.update(f"{tuple(self.images.shape)}\n".encode())
            digest.update(self.images.numpy().data)
            return HASHED[0]
        count = len(self)
        large = is_large(count)
        read: Container[int] = frozenset(sample(count).tolist()) if large else range(count)

        def digests(rows: range) -> bytes:
            return b"".join(self.table.digest(i, content=i in read) for i in rows)

        for some in in_chunks(count, digests):
            digest.update(some)
        return HASHED[2 if large else 1]

    def statistics(self) -> Statistics:
        """Measure mean and deviation of each channel, of values 0..1."""
        if self.images is not None:
            return *mean_std([self.images.numpy()]), f"all training {self.kind.nouns}"
        rows = sample(len(self))
        mean, std = mean_std(self.read(int(i)).numpy()[None] for i in rows)
        few = f"a fixed sample of {len(rows)}" if len(rows) < len(self) else "all"
        return mean, std, f"{few} training {self.kind.nouns}"


class ImagesInMemory(Inputs):
    """Images that are decoded in memory at one size."""

    def __init__(self, table: Table, images: Tensor, crop_pct: float = 1.0) -> None:
        size: Size = (images.shape[-2], images.shape[-1])
        super().__init__(table, size, images.shape[1], crop_pct)
        self.images: Tensor = images

    def read(self, i: int) -> Tensor:
        """Copy image ``i``."""
        return self.images[i].clone()

    def refuse(self, augment: Augment) -> None:
        """Refuse timm's RandAugment, which takes images one by one."""
        if augment.auto_augment:
            height, width = self.image_size
            raise UserError(
                f"augment.auto_augment={augment.auto_augment!r} changes images one by one, and at "
                f"{height}x{width} pixels (data.image_size) this set is kept in memory. Use "
                "augment.rand_augment, operations and magnitude such as 2,9."
            )


class ImagesOneByOne(Inputs):
    """Images that are decoded when they are needed."""

    def read(self, i: int) -> Tensor:
        """Decode image ``i`` through the evaluation transform."""
        with reading(self.table.name(i), REMEDY), self.table.open(i) as image:
            pixels = evaluation_array(
                image, self.image_size, self.in_chans, self.crop_pct, self.table.white_level
            )
        return torch.from_numpy(pixels.copy())

    @property
    def drafted(self) -> bool:
        """A JPEG file is decoded smaller at first, which is quicker."""
        return True

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give size and pixels of image ``i`` before it is resized; of a draft unless whole."""
        return drafted_content(self.table, i, self.in_chans, whole=whole)

    def refuse(self, augment: Augment) -> None:
        """Refuse RandAugment before the crop, and timm's for images that it does not fit."""
        if augment.rand_augment[0] and augment.rand_augment_first:
            raise UserError(
                "augment.rand_augment_first=True needs images that are in memory (128 pixels "
                "a side or less); this set is read one by one and cropped first. Leave it out."
            )
        if augment.auto_augment:
            _auto_augment(augment.auto_augment, self.in_chans, *self.image_size)

    def make(self, order: Order, targets: Targets, augment: Augment | None, seed: int) -> Made:
        """Decode, crop and augment a batch; its targets are taken by position."""
        epoch, index = order
        positions = torch.from_numpy(index)
        if augment is None:
            return Made(channels_last(self.batch(index)), positions, None)
        pixels = self._cropped(order, augment.random_resized_crop, seed)
        if augment.flip:
            flipped = flips(index, seed=seed, epoch=epoch)
            pixels[flipped] = pixels[flipped][..., ::-1]
        if augment.auto_augment:
            change = _auto_augment(augment.auto_augment, *pixels.shape[1:])
            pixels = change(pixels, index, seed=seed, epoch=epoch)
        images = torch.from_numpy(pixels)
        count, bin_ = augment.rand_augment
        height, width = self.image_size
        if count:
            (plan,) = plans(index, count, len(index), seed=seed, epoch=epoch, device=CPU)
            images = _rand_augment(bin_, height, width)(images, plan)
        if not augment.erasing:
            return Made(channels_last(images), positions, None)
        boxes = erased_boxes(index, augment.erasing, height, width, seed=seed, epoch=epoch)
        return Made(channels_last(images), positions, torch.from_numpy(boxes))

    def _cropped(
        self, order: Order, area: tuple[float, float], seed: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Cut a box out of each image and resize it."""
        epoch, index = order
        pixels = np.empty((len(index), self.in_chans, *self.image_size), dtype=np.uint8)
        shape = self.image_size[1] / self.image_size[0]
        for k, i in enumerate(index.tolist()):
            image = self.decoded(i)
            top, left, h, w = resized_crop(
                i, image.height, image.width, area, shape=shape, seed=seed, epoch=epoch
            )
            pixels[k] = to_array(resize(image, self.image_size, (left, top, left + w, top + h)))
        return pixels


def drafted_content(table: Table, i: int, in_chans: int, *, whole: bool) -> tuple[bytes, bool]:
    """Give size and pixels of image ``i`` before it is resized; of a draft unless whole."""
    with table.open(i) as opened:
        size = opened.size
        if not whole:
            opened.draft(None, (_SIDE, _SIDE))
        decoded = convert(opened, in_chans, table.white_level)
    if one_colour(decoded) and not whole:  # it may have details
        return drafted_content(table, i, in_chans, whole=True)
    return f"{size}".encode() + decoded.tobytes(), one_colour(decoded)


def channels_last(images: Tensor) -> Tensor:
    """Arrange a batch ``[B, C, H, W]`` with its channels last, which convolutions prefer."""
    return images.contiguous(memory_format=torch.channels_last)


@functools.lru_cache(maxsize=4)
def _rand_augment(bin_: int, height: int, width: int) -> RandAugment:
    """Make the operations once a process."""
    return RandAugment(bin_, height, width, CPU)


@functools.lru_cache(maxsize=4)
def _auto_augment(config: str, channels: int, height: int, width: int) -> AutoAugment:
    """Make timm's operations once a process."""
    return AutoAugment(config, channels, height, width)


class WholeImages(Inputs):
    """Images of which all is seen, at their own sizes or resized without a crop."""

    def __init__(
        self,
        table: Table,
        image_size: Size,
        in_chans: int,
        *,
        own_sizes: bool = False,
        listed: bool = False,
    ) -> None:
        super().__init__(table, image_size, in_chans)
        self.own_sizes, self.listed = own_sizes, listed

    def read(self, i: int) -> Tensor:
        """Decode image ``i``, and resize it unless it keeps its own size."""
        pixels = to_array(self.decoded(i))
        if self.own_sizes:
            return torch.from_numpy(pixels.copy())
        return resized_image(pixels, self.image_size)

    def refuse(self, augment: Augment) -> None:
        """Refuse several sizes of images that are not resized with their proportions."""
        if augment.multi_scale is not None:
            raise UserError(
                f"augment.multi_scale={augment.multi_scale!r} is for images that are resized with "
                "their proportions (Task.fits), and these are not. Set it to none."
            )


class FittedImages(WholeImages):
    """Images of which all is seen, resized with their proportions to a short and a long side.

    In training the short side may vary. An image is decoded and resized once, and its target is
    read at the size that the image then has.
    """

    def __init__(self, table: Table, image_size: Size, in_chans: int) -> None:
        super().__init__(table, image_size, in_chans, listed=True)

    def read(self, i: int) -> Tensor:
        """Decode image ``i`` and resize it as evaluation does."""
        return self._within(i, self.image_size)

    def pair(
        self, i: int, targets: Targets, augment: Augment | None, *, seed: int, epoch: int
    ) -> tuple[Tensor, Target]:
        """Read image ``i`` at the size that it has in an epoch, and its target at that size."""
        short, long = self.image_size
        if augment is not None and augment.multi_scale is not None:
            short = short_side(i, *augment.multi_scale, seed=seed, epoch=epoch)
        image = self._within(i, (short, long))
        return image, targets.read_at(i, (image.shape[-2], image.shape[-1]))

    def refuse(self, augment: Augment) -> None:
        """Refuse short sides beyond the long one, at which nothing would vary."""
        long = self.image_size[1]
        if augment.multi_scale is not None and augment.multi_scale[1] > long:
            raise UserError(
                f"augment.multi_scale={augment.multi_scale!r}: no side may be longer than {long} "
                "pixels (data.image_size). Make the short sides smaller, or set it to none."
            )

    @property
    def drafted(self) -> bool:
        """A JPEG file is decoded smaller at first, which is quicker."""
        return True

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give size and pixels of image ``i`` before it is resized; of a draft unless whole."""
        return drafted_content(self.table, i, self.in_chans, whole=whole)

    def statistics(self) -> Statistics:
        """Measure mean and deviation of each channel of images before they are resized."""
        rows = sample(len(self)).tolist()

        def count(some: range) -> IntArray:
            return _counts(to_array(self.decoded(rows[k]))[None] for k in some)

        mean, std = _moments(np.stack(in_chunks(len(rows), count)).sum(0))
        few = f"a fixed sample of {len(rows)}" if len(rows) < len(self) else "all"
        return mean, std, f"{few} training {self.kind.nouns}"

    def _within(self, i: int, within: Size) -> Tensor:
        pixels = to_array(self.decoded(i))
        return resized_image(pixels, fitted_size((pixels.shape[1], pixels.shape[2]), within))


def mean_std(images: Iterable[NDArray[np.uint8]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and standard deviation of each channel, of values 0..1.

    Counted in integers, so the result does not depend on the order of the images.

    Shape: arrays of ``[N, C, H, W]`` -> C numbers each.
    """
    return _moments(_counts(images))


def _counts(images: Iterable[NDArray[np.uint8]]) -> IntArray:
    """Count the values of each channel, ``[C, 256]``."""
    counts = None
    for part in images:
        if counts is None:
            counts = np.zeros((part.shape[1], 256), dtype=np.int64)
        step = max(1, _CHANNEL_CHUNK // (part.shape[2] * part.shape[3]))
        for start in range(0, len(part), step):
            for channel in range(part.shape[1]):
                plane = part[start : start + step, channel]
                counts[channel] += np.bincount(plane.ravel(), minlength=256)
    assert counts is not None
    return counts


def _moments(counts: IntArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    value = np.arange(256) / 255.0
    total = counts.sum(axis=1)
    mean = counts @ value / total
    variance = np.maximum(counts @ value**2 / total - mean**2, 0.0)
    std = np.maximum(np.sqrt(variance), 1 / 255)  # a flat channel must not divide by zero
    return tuple(mean.tolist()), tuple(std.tolist())
