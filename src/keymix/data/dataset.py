# SPDX-License-Identifier: Apache-2.0
"""A data set in memory or on disk: its splits, what was measured of it, and its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torchvision import tv_tensors

from keymix.data.decode import reading
from keymix.data.instances import Instances
from keymix.data.kinds import CLASS, InputKind, MaskKind, TargetKind, mask_kind
from keymix.data.pixels import picture, prepared
from keymix.data.record import DataFacts, DataRecord
from keymix.data.sample import REMEDY, Row, Size, size_of
from keymix.data.shards import Shards
from keymix.data.splits import digest
from keymix.data.streams import IntArray
from keymix.data.view import View, resized
from keymix.errors import UserError
from keymix.task import Task


@dataclass(frozen=True, eq=False, kw_only=True)
class Split:
    """The samples of one split, by position.

    Args:
        name: ``train``, ``val`` or ``test``.
        rows: The samples.
        index: Their places in the table ``origin`` of the source, ascending.
        origin: The table: the source's train, val or test.
        kind: The kind of input.
        target_kind: The kind of target.
        view: How a model sees the images.
        images: All of them as evaluation sees them, ``[N, C, H, W]``, where they are in memory.
        targets: All masks at that size, where they are.
        outside: What a mask shows where a moved image shows nothing.
        listed: Whether a batch is a list of images, each of its own size.
        values: All targets as one tensor ``[N, ...]``; None of ragged ones and of those with a
            place in the image.
        groups: The group of each, such as a patient; empty where nothing binds samples together.
    """

    name: str
    rows: Sequence[Row] = field(repr=False)
    index: IntArray = field(repr=False)
    origin: str
    kind: InputKind
    target_kind: TargetKind
    view: View
    images: Tensor | None = None
    targets: Tensor | None = None
    outside: int = 0
    listed: bool = False
    values: Tensor | None = None
    groups: Sequence[str] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def image_size(self) -> Size:
        """Height and width in pixels."""
        return self.view.size

    @property
    def in_chans(self) -> int:
        """Channels."""
        return self.view.channels

    @property
    def labels(self) -> Tensor:
        """Class numbers, int64 ``[N]``.

        Raises:
            UserError: If the targets are no classes, or the split is a stream.
        """
        if self.stream is not None:
            raise UserError(
                f"the {self.kind.nouns} of {self.name} are a stream, whose labels come with them: "
                "`keymix train`, `eval` and `predict` take it. Name the data that the shards were "
                "made of, or parquet:PATH."
            )
        if self.target_kind is not CLASS or self.values is None:
            raise UserError(
                f"the {self.kind.nouns} of {self.name} have {self.target_kind.nouns}, no class "
                "each: this works on data for classification."
            )
        return self.values

    @property
    def stream(self) -> Shards | None:
        """The shards that the samples are streamed from; None of those read by position."""
        return self.rows if isinstance(self.rows, Shards) else None

    @property
    def sha256(self) -> str:
        """Hash of which samples these are."""
        return digest(self.origin, self.index) if self.stream is None else self.stream.digest

    def of(self, rows: Mapping[int, Row]) -> Split:
        """Return the split with some of its samples, read, by position; their classes with them."""
        classes = torch.tensor([row.target for row in rows.values()])
        return replace(self, rows=cast("Sequence[Row]", rows), values=classes)

    def ids(self, i: int) -> str:
        """Say where sample ``i`` comes from: its file, or its file and row."""
        return self.rows[i].id

    def size(self, i: int) -> Size:
        """Return height and width of image ``i`` before it is resized."""
        row = self.rows[i]
        if isinstance(row.target, Instances):
            return row.target.size
        with reading(row.id, REMEDY):
            return size_of(row.image)

    def own(self, i: int) -> Tensor:
        """Read image ``i`` at its own size, of 0..255 and the data's channels.

        Raises:
            UserError: If it is damaged; it is named.
        """
        row = self.rows[i]
        with reading(row.id, REMEDY):
            return self.view.values(row.image())

    def read(self, i: int) -> Tensor:
        """Read image ``i`` as evaluation sees it, uint8 ``[C, H, W]``; frames are ``[T, C, H, W]``.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        return self.view.shown(self.own(i)) if self.images is None else self.images[i].clone()

    def target(self, i: int) -> Any:
        """Read the target of image ``i`` at the size at which evaluation sees the image."""
        if self.targets is not None:
            return tv_tensors.Mask(self.targets[i].clone())
        target = self.rows[i].read_target()
        if not self.target_kind.placed:
            return target
        if self.view.mode == "window":
            return tv_tensors.Mask(self.view.centre(target, self.outside))
        own = self.size(i)
        return resized(target, own, self.view.size_of(own))

    def mask(self, i: int) -> Tensor:
        """Read the mask of image ``i`` at the size of the images, uint8.

        Class numbers ``[H, W]`` of exclusive masks, 0 and 1 ``[K, H, W]`` of others; 255 is
        ignored.

        Raises:
            UserError: If image or mask is damaged; it is named.
            ValueError: If the split has no masks.
        """
        found = self.target(i)
        if not isinstance(found, tv_tensors.Mask):
            raise ValueError(f"the split {self.name!r} has no masks")
        mask: Tensor = found.as_subclass(Tensor)
        return mask

    def picture(self, i: int) -> Tensor:
        """Read image ``i`` for a person to look at, uint8 ``[C, H, W]``.

        Of frames, red where it became darker and blue where brighter, over all time; of a stack of
        slices, the middle one.
        """
        return picture(self.read(i), self.kind)


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
        found: What the source found that does not stop training: level and items by kind of
            finding (`keymix.data.findings`).
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
    found: Mapping[str, tuple[str, Sequence[Any]]] = field(default_factory=dict)

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
        return mask_kind(self.facts.masks, self.classes)

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """Train, val and test."""
        return self.train, self.val, self.test

    @property
    def crop_pct(self) -> float:
        """Share of the resized image's side that the evaluation crop keeps."""
        return self.test.view.crop_pct

    def prepared(self, pixels: Tensor) -> Tensor:
        """Make of ``[B, C, H, W]`` read by a split what a model is given, float32.

        Images are normalised. Frames ``[B, T, C, H, W]`` stay the counts that they are.
        """
        return prepared(pixels, self.kind, mean=self.mean, std=self.std)

    def some(self, split: Split, number: int) -> list[Tensor]:
        """Read up to `number` images, spread over a split, as a model is given them."""
        number = min(number, len(split))
        rows = [i * len(split) // number for i in range(number)]
        return [self.prepared(split.read(i)) for i in rows]

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
            index_sha256={split.name: split.sha256 for split in self.splits},
            task=self.task.name,
            multilabel=self.masks.multilabel if self.masks else None,
            **vars(self.facts),
        )
