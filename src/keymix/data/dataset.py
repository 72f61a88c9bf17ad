# SPDX-License-Identifier: Apache-2.0
"""A data set in memory or on disk: its splits, what was measured of it, and its record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from keymix.data.decode import Size, convert, evaluation_array, reading
from keymix.data.kinds import IMAGE, RECORDING, SLICES, InputKind
from keymix.data.measure import REMEDY
from keymix.data.pixels import picture_of
from keymix.data.record import DataFacts, DataRecord
from keymix.data.sources.base import Table
from keymix.data.splits import digest
from keymix.data.streams import IntArray
from keymix.data.tasks import CLASSIFICATION, SEGMENTATION, MaskKind
from keymix.task import Task

if TYPE_CHECKING:
    from keymix.data.events.store import Frames
    from keymix.data.segmentation.table import ScanTable, Unlisted


@dataclass(frozen=True, eq=False, kw_only=True)
class Split:
    """Labelled images of one split, in memory or read one by one.

    Args:
        name: ``train``, ``val`` or ``test``.
        labels: Class numbers, int64 ``[N]``.
        images: uint8 ``[N, C, H, W]`` if the set is held in memory, else None.
        rows: Rows of the source's table ``origin`` that the split consists of, ascending.
        origin: The table: the source's train, val or test.
        table: Where the images are opened.
        image_size: Height and width in pixels.
        in_chans: Channels.
        crop_pct: Share of the resized image's side that the evaluation crop keeps.
        frames: The frames of the whole set, where the images are recordings of events.
        scans: The table as one of images with masks, where the task is segmentation; labels are
            0 then.
    """

    name: str
    labels: Tensor
    images: Tensor | None
    rows: IntArray
    origin: str
    table: Table
    image_size: Size
    in_chans: int
    crop_pct: float
    frames: Frames | None = None
    scans: ScanTable | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def ids(self, i: int) -> str:
        """Say where image ``i`` comes from: its file, or its file and row."""
        return self.table.name(i)

    def read(self, i: int) -> Tensor:
        """Read image ``i`` as evaluation sees it, uint8 ``[C, H, W]``; frames are ``[T, C, H, W]``.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        if self.frames is not None:
            return self.frames_of(np.array([i], dtype=np.int64))[0]
        if self.scans is not None:
            return self.scans.read(i, self.image_size)[0]
        if self.images is not None:
            return self.images[i].clone()
        with reading(self.ids(i), REMEDY), self.table.open(i) as image:
            array = evaluation_array(image, self.image_size, self.in_chans, self.crop_pct)
        return torch.from_numpy(array.copy())

    def frames_of(self, index: IntArray) -> Tensor:
        """Copy the frames of some recordings, counts ``[n, T, C, H, W]``.

        Raises:
            ValueError: If the split has images.
        """
        if self.frames is None:
            raise ValueError(f"the split {self.name!r} has images, no frames")
        return self.frames.tensor(self.table.set_rows(index))

    def mask(self, i: int) -> Tensor:
        """Read the mask of image ``i`` at the size of the images, uint8.

        Class numbers ``[H, W]`` of exclusive masks, 0 and 1 ``[K, H, W]`` of others; 255 is
        ignored.

        Raises:
            UserError: If image or mask is damaged; it is named.
            ValueError: If the split has no masks.
        """
        if self.scans is None:
            raise ValueError(f"the split {self.name!r} has no masks")
        return self.scans.read(i, self.image_size)[1]

    def picture(self, i: int) -> Tensor:
        """Read image ``i`` for a person to look at, uint8 ``[C, H, W]``.

        Of frames, red where it became darker and blue where brighter, over all time; of a stack of
        slices, the middle one.
        """
        image = self.read(i)
        if self.scans is not None and self.scans.stacked:
            return image[self.in_chans // 2][None]
        return image if self.frames is None else picture_of(image)

    def decoded(self, i: int) -> Image.Image:
        """Decode image ``i`` at its own size, for transforms that crop before they resize.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        with reading(self.ids(i), REMEDY), self.table.open(i) as image:
            return convert(image, self.in_chans)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData:
    """A data set, split and measured.

    Args:
        spec: The data spec it was loaded from.
        classes: Names of the classes, by label.
        image_size: Height and width of the images in pixels.
        in_chans: Channels, 1 or 3; 2, the polarities, of frames of events.
        mean: Mean of each channel over train, of values 0..1; 0 of frames.
        std: Standard deviation of each channel over train; 1 of frames.
        train: The split to learn from.
        val: The split to choose by; carved from train unless the source brings one.
        test: The split that is read once, at the end.
        facts: What loading found and did.
        time_steps: Frames of a recording, where the images are recordings of events; else None.
        masks: What the masks are, where the task is segmentation; else None.
        unlisted: Slices for which the table of masks lacks rows.
    """

    spec: str
    classes: tuple[str, ...]
    image_size: Size
    in_chans: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    val: Split
    test: Split
    facts: DataFacts
    time_steps: int | None = None
    masks: MaskKind | None = None
    unlisted: tuple[Unlisted, ...] = ()

    @property
    def task(self) -> Task:
        """What is learned from it."""
        return CLASSIFICATION if self.masks is None else SEGMENTATION

    @property
    def kind(self) -> InputKind:
        """The kind of input."""
        if self.time_steps is not None:
            return RECORDING
        return IMAGE if self.facts.stack in (None, 1) else SLICES

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """Train, val and test."""
        return self.train, self.val, self.test

    @property
    def crop_pct(self) -> float:
        """Share of the resized image's side that the evaluation crop keeps."""
        return self.test.crop_pct

    def prepared(self, pixels: Tensor) -> Tensor:
        """Make of ``[B, C, H, W]`` read by a split what a model is given, float32.

        Images are normalised. Frames ``[B, T, C, H, W]`` stay the counts that they are.
        """
        if self.time_steps is not None:
            return pixels.float()
        mean = torch.tensor(self.mean, dtype=torch.float64).view(1, -1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64).view(1, -1, 1, 1)
        return ((pixels.double() / 255 - mean) / std).float()

    def record(self) -> DataRecord:
        """Everything about the data that a result depends on.

        ``index_sha256`` hashes the rows of every split; ``fingerprint`` hashes images and labels,
        as ``fingerprint_of`` says. `keymix.records.to_json` gives plain data.
        """
        return DataRecord(
            spec=self.spec,
            classes=self.classes,
            image_size=self.image_size,
            in_chans=self.in_chans,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
            cached=self.train.images is not None,
            sizes={split.name: len(split) for split in self.splits},
            index_sha256={split.name: digest(split.origin, split.rows) for split in self.splits},
            task=self.task.name,
            multilabel=None if self.masks is None else self.masks.multilabel,
            **vars(self.facts),
        )
