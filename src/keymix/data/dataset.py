# SPDX-License-Identifier: Apache-2.0
"""A data set in memory or on disk: its splits, what was measured of it, and its record."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from keymix.data.decode import Size
from keymix.data.events.cache import Frames
from keymix.data.inputs import Inputs
from keymix.data.kinds import InputKind, MaskKind
from keymix.data.record import DataFacts, DataRecord
from keymix.data.segmentation.table import MaskTargets, ScanTable, Unlisted
from keymix.data.sources.base import Table
from keymix.data.splits import digest
from keymix.data.streams import IntArray
from keymix.data.targets import ClassTargets, Targets
from keymix.errors import UserError
from keymix.task import Task


@dataclass(frozen=True, eq=False, kw_only=True)
class Split:
    """The inputs of one split with their targets.

    Args:
        name: ``train``, ``val`` or ``test``.
        inputs: Images, frames of recordings or stacks of slices, by position.
        targets: What a model is to learn of each, by position.
        rows: Rows of the source's table ``origin`` that the split consists of, ascending.
        origin: The table: the source's train, val or test.
        table: Where the inputs are opened.
    """

    name: str
    inputs: Inputs
    targets: Targets
    rows: IntArray
    origin: str
    table: Table

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def kind(self) -> InputKind:
        """The kind of input."""
        return self.inputs.kind

    @property
    def image_size(self) -> Size:
        """Height and width in pixels."""
        return self.inputs.image_size

    @property
    def in_chans(self) -> int:
        """Channels."""
        return self.inputs.in_chans

    @property
    def crop_pct(self) -> float:
        """Share of the resized image's side that the evaluation crop keeps."""
        return self.inputs.crop_pct

    @property
    def images(self) -> Tensor | None:
        """uint8 ``[N, C, H, W]`` if the set is in memory, else None."""
        return self.inputs.images

    @property
    def labels(self) -> Tensor:
        """Class numbers, int64 ``[N]``.

        Raises:
            UserError: If the targets are no classes.
        """
        if not isinstance(self.targets, ClassTargets):
            raise UserError(
                f"the {self.inputs.kind.nouns} of {self.name} have {self.targets.kind.nouns}, no "
                "class each: this works on data for classification."
            )
        return self.targets.values

    @property
    def frames(self) -> Frames | None:
        """The frames of the whole set, where inputs are recordings of events."""
        return self.inputs.frames

    @property
    def scans(self) -> ScanTable | None:
        """The table as one of images with masks, where it is."""
        return self.table if isinstance(self.table, ScanTable) else None

    def ids(self, i: int) -> str:
        """Say where input ``i`` comes from: its file, or its file and row."""
        return self.table.name(i)

    def read(self, i: int) -> Tensor:
        """Read image ``i`` as evaluation sees it, uint8 ``[C, H, W]``; frames are ``[T, C, H, W]``.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        return self.inputs.read(i)

    def frames_of(self, index: IntArray) -> Tensor:
        """Copy the frames of some recordings, counts ``[n, T, C, H, W]``.

        Raises:
            ValueError: If the split has images.
        """
        if self.inputs.frames is None:
            raise ValueError(f"the split {self.name!r} has images, no frames")
        return self.inputs.batch(index)

    def mask(self, i: int) -> Tensor:
        """Read the mask of image ``i`` at the size of the images, uint8.

        Class numbers ``[H, W]`` of exclusive masks, 0 and 1 ``[K, H, W]`` of others; 255 is
        ignored.

        Raises:
            UserError: If image or mask is damaged; it is named.
            ValueError: If the split has no masks.
        """
        if not isinstance(self.targets, MaskTargets):
            raise ValueError(f"the split {self.name!r} has no masks")
        return self.targets.read(i)

    def picture(self, i: int) -> Tensor:
        """Read image ``i`` for a person to look at, uint8 ``[C, H, W]``.

        Of frames, red where it became darker and blue where brighter, over all time; of a stack of
        slices, the middle one.
        """
        return self.inputs.picture(i)

    def decoded(self, i: int) -> Image.Image:
        """Decode image ``i`` at its own size, for transforms that crop before they resize.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        return self.inputs.decoded(i)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData:
    """A data set, split and measured.

    Args:
        spec: The data spec it was loaded from.
        classes: Names of the classes, by label; none where targets are others.
        image_size: Height and width of the images in pixels; the largest of each where they keep
            their own; short and long side where they keep their proportions (`Task.fits`).
        in_chans: Channels, 1 or 3; 2, the polarities, of frames of events.
        mean: Mean of each channel over train, of values 0..1; 0 of frames.
        std: Standard deviation of each channel over train; 1 of frames.
        train: The split to learn from.
        val: The split to choose by; split from train unless the source brings one.
        test: The split that is read once, at the end.
        facts: What loading found and did.
        task: What is learned from it.
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
    task: Task

    @property
    def kind(self) -> InputKind:
        """The kind of input."""
        return self.train.kind

    @property
    def time_steps(self) -> int | None:
        """Frames of a recording, where the inputs are recordings of events; else None."""
        return self.facts.time_steps

    @property
    def masks(self) -> MaskKind | None:
        """What the masks are, where targets are masks; else None."""
        targets = self.train.targets
        return targets.masks if isinstance(targets, MaskTargets) else None

    @property
    def unlisted(self) -> tuple[Unlisted, ...]:
        """Slices for which the table of masks lacks rows."""
        targets = self.train.targets
        return targets.unlisted if isinstance(targets, MaskTargets) else ()

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
        if not self.kind.normalised:
            return pixels.float()
        mean = torch.tensor(self.mean, dtype=torch.float64).view(1, -1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64).view(1, -1, 1, 1)
        return ((pixels.double() / 255 - mean) / std).float()

    def record(self) -> DataRecord:
        """Everything about the data that a result depends on.

        ``index_sha256`` hashes the rows of every split; ``fingerprint`` hashes inputs and targets,
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
            multilabel=self.train.targets.multilabel,
            **vars(self.facts),
        )
