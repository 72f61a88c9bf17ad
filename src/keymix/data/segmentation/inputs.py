# SPDX-License-Identifier: Apache-2.0
"""Images with masks: how they are prepared when data are loaded, and served by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.decode import Size
from keymix.data.files import in_chunks
from keymix.data.inputs import WholeImages
from keymix.data.kinds import IMAGE, SLICES, MaskKind
from keymix.data.loading import DEFAULT_SIZE, Pairs, Preparation
from keymix.data.record import DataFacts
from keymix.data.segmentation.augment import augmented, outside
from keymix.data.segmentation.table import (
    MaskTargets,
    ScanSource,
    ScanTable,
    Seen,
    Unlisted,
    check_choices,
    unfit,
)
from keymix.data.sources.base import Source, Table, refuse, some
from keymix.data.specs import MASKS, SPLIT_BY, Options
from keymix.data.splits import Part, shared_note
from keymix.data.streams import IntArray
from keymix.data.targets import Target
from keymix.errors import UserError
from keymix.task import Task


class ScanImages(WholeImages):
    """Images with masks, resized without regard to their proportions, so that all is seen."""

    def __init__(self, table: ScanTable, image_size: Size, images: Tensor | None = None) -> None:
        super().__init__(table, image_size, table.channels)
        self.scans = table
        self.kind = SLICES if table.stacked else IMAGE
        self.images = images

    def read(self, i: int) -> Tensor:
        """Copy image ``i`` from memory, or read and resize it."""
        if self.images is not None:
            return self.images[i].clone()
        return self.scans.image_at(i, self.image_size)

    def picture(self, i: int) -> Tensor:
        """Read image ``i``; of a stack, the slice in the middle."""
        image = self.read(i)
        return image[self.in_chans // 2][None] if self.scans.stacked else image

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give the pixels of image ``i``; of a stack, of the slice in the middle."""
        del whole
        image = self.picture(i).numpy()
        return image.tobytes(), bool(image.min() == image.max())


class SplitMasks(MaskTargets):
    """The masks of a split, at the size of its images."""

    moves = True

    def __init__(
        self,
        table: ScanTable,
        masks: MaskKind,
        image_size: Size,
        unlisted: Sequence[Unlisted] = (),
        in_memory: Tensor | None = None,
    ) -> None:
        super().__init__(table)
        self.masks: MaskKind = masks
        self.multilabel = masks.multilabel
        self.image_size, self.unlisted = image_size, tuple(unlisted)
        self.in_memory = in_memory

    def read(self, i: int) -> Tensor:
        """Read the mask of image ``i`` at the size of the images, uint8."""
        if self.in_memory is not None:
            return self.in_memory[i].clone()
        return self.table.mask_at(i, self.image_size)

    def select(self, rows: IntArray) -> SplitMasks:
        """Keep the masks of ``rows``."""
        masks = None if self.in_memory is None else self.in_memory[rows]
        return SplitMasks(
            self.table.select(rows), self.masks, self.image_size, self.unlisted, masks
        )

    def augmented(
        self, image: Tensor, target: Target, i: int, augment: Augment, *, seed: int, epoch: int
    ) -> tuple[Tensor, Target]:
        """Augment an image and its mask together."""
        assert isinstance(target, Tensor)
        fill = outside(self.masks)
        return augmented(image, target, i, augment, fill=fill, seed=seed, epoch=epoch)


IN_MEMORY_BYTES = 1 << 30  # sets stay in memory if all their splits together stay below this


class ScanPreparation(Preparation):
    """What loading does for images with masks.

    All masks that are text, the headers of all images and, in sets kept in memory, all pixels are
    checked here, before anything is trained.
    """

    source: ScanSource

    def __init__(self, source: Source, spec: str, options: Options, task: Task) -> None:
        super().__init__(source, spec, options, task)
        check_choices(None, options.split_by)
        self.split_by = options.split_by or SPLIT_BY[0]
        share = options.test_fraction
        if share is not None and not 0.0 < share < 1.0:
            raise UserError(f"test_fraction={share} is not between 0 and 1, both excluded.")
        self._seen: dict[str, list[Seen]] = {}
        self._scans: dict[str, ScanTable] = {}

    def look(self, tables: Mapping[str, Table]) -> None:
        """Look at all images and masks; decode them where broken ones are left out."""
        decode = self.options.skip_corrupt
        self._seen = {name: _seen(table, decode=decode) for name, table in tables.items()}

    def broken(self, name: str, table: Table) -> Mapping[int, str]:
        """Say what is wrong with images and masks of a split."""
        del table
        return {
            i: "; ".join(fault.message for fault in each.faults)
            for i, each in enumerate(self._seen[name])
            if each.faults
        }

    def check(self, tables: Mapping[str, Table]) -> None:
        """Refuse the first image with a fault."""
        if self.options.skip_corrupt:
            self._seen = {
                name: [each for each in found if not each.faults]
                for name, found in self._seen.items()
            }
        for found in self._seen.values():
            for each in found:
                refuse(each.faults)

    def pairs(self, tables: dict[str, Table]) -> Pairs:
        """Make images and masks of each split, in memory where the set is small."""
        scans = {name: _scans(table) for name, table in tables.items()}
        size = self.options.image_size or _common_size(scans)
        self._scans, source = scans, self.source
        planes = source.in_chans + (len(source.classes) if source.masks.multilabel else 1)
        small = sum(map(len, scans.values())) * planes * size[0] * size[1] < IN_MEMORY_BYTES
        pairs: Pairs = {}
        for name, table in scans.items():
            images, masks = _decoded(table, size) if small else (None, None)
            pairs[name] = (
                ScanImages(table, size, images),
                SplitMasks(table, source.masks, size, source.unlisted, masks),
            )
        return pairs

    def notes(self, parts: Mapping[str, Part]) -> list[str]:
        """Report cases in several splits, of overlaps, and of slices without a row."""
        notes = shared_note(parts) if self.split_by == "slice" else []
        notes += _notes(self._seen)
        if self.source.unlisted:
            ids = some([each.id for each in self.source.unlisted], 3)
            notes.append(f"slices without a row for an organ, which count as without it: {ids}")
        return notes

    def facts(self, facts: DataFacts) -> DataFacts:
        """Add what the masks are, and how many cases and classes there are in each split."""
        source, options = self.source, self.options
        undivided = "test" not in source.tables and "val" not in source.tables
        why = unfit(self._seen, source.masks, source.classes)
        return replace(
            facts,
            test_fraction=(options.test_fraction or source.test_fraction) if undivided else None,
            split_by=self.split_by,
            masks=MASKS[source.masks.multilabel],
            stack=options.stack or 1,
            cases={name: len(set(table.groups)) for name, table in self._scans.items()},
            empty={name: sum(each.empty for each in found) for name, found in self._seen.items()},
            unfit=why[0] if why else None,
            grouped=source.grouped,
            class_images={
                name: tuple(
                    sum(c in each.classes for each in found) for c in range(len(source.classes))
                )
                for name, found in self._seen.items()
            },
        )


def _decoded(table: ScanTable, size: Size) -> tuple[Tensor, Tensor]:
    """Decode all images and masks of a table at a size."""
    count = len(table)
    images = np.empty((count, table.channels, *size), dtype=np.uint8)
    masks = np.empty((count, *table.mask(0).shape[:-2], *size), dtype=np.uint8)

    def decode(rows: range) -> None:
        for i in rows:
            image, mask = table.read(i, size)
            images[i], masks[i] = image.numpy(), mask.numpy()

    in_chunks(count, decode)
    return torch.from_numpy(images), torch.from_numpy(masks)


def _scans(table: Table) -> ScanTable:
    assert isinstance(table, ScanTable)
    return table


def _seen(table: Table, *, decode: bool) -> list[Seen]:
    """Look at all images of a table."""
    scans = _scans(table)

    def look(rows: range) -> list[Seen]:
        return [scans.inspect(i, decode=decode) for i in rows]

    return [each for part in in_chunks(len(table), look) for each in part]


def _notes(seen: Mapping[str, Sequence[Seen]]) -> list[str]:
    """Say how much of masks was overwritten, and of stacks replaced."""
    every = [each for found in seen.values() for each in found]
    notes = []
    over = [each.overlap for each in every if each.overlap]
    if over:
        notes.append(
            f"classes overlap in {sum(over):,} pixels of {len(over):,} image{'s' * (len(over) > 1)}"
            ": the later class is kept (task.options.masks=multilabel keeps all)"
        )
    if replaced := sum(each.replaced for each in every):
        notes.append(
            f"{replaced:,} missing neighbours in the stacks replaced by the nearest slice on the "
            "way to them"
        )
    return notes


def _common_size(tables: Mapping[str, ScanTable]) -> Size:
    sizes = {table.size(i) for table in tables.values() for i in range(len(table))}
    return sizes.pop() if len(sizes) == 1 else DEFAULT_SIZE
