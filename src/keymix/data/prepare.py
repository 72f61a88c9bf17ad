# SPDX-License-Identifier: Apache-2.0
"""What loading does for one kind of data: what it looks for, and what makes inputs and targets.

`keymix.data.loading.load` is the same for all; a source names the class of its kind here or in the
folder of its kind (`keymix.data.sources.base.Source.preparation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from keymix.data.carve import Part
from keymix.data.decode import Size
from keymix.data.files import in_chunks
from keymix.data.inputs import ImagesInMemory, ImagesOneByOne, Inputs, WholeImages
from keymix.data.measure import broken, decode_all, header_size, header_sizes
from keymix.data.record import DataFacts
from keymix.data.sources.base import Source, Table
from keymix.data.specs import Options
from keymix.data.targets import Targets
from keymix.errors import UserError
from keymix.task import Task

CACHE_SIDE = 96  # pixels: images up to this side are kept decoded in memory …
CACHE_BYTES = 2 << 30  # … if all splits together stay below this
LAZY_CROP_PCT = 0.875  # timm's evaluation crop for images read one by one
DEFAULT_SIZE: Size = (224, 224)
"""Height and width of images that have no common size and where nobody says one."""

Pairs = dict[str, tuple[Inputs, Targets]]
"""Inputs and targets of each split."""


class Preparation:
    """What loading does for images."""

    def __init__(self, source: Source, spec: str, options: Options, task: Task) -> None:
        self.source, self.spec, self.options, self.task = source, spec, options, task
        self._notes: list[str] = []

    def look(self, tables: Mapping[str, Table]) -> None:
        """Look at all inputs before any is left out."""

    def broken(self, name: str, table: Table) -> Mapping[int, str]:
        """Say what is wrong with inputs of a split, by position in ascending order."""
        del name
        return broken(table, self.source.in_chans)

    def check(self, tables: Mapping[str, Table]) -> None:
        """Refuse the first input with a fault, of those that `look` saw."""

    def pairs(self, tables: dict[str, Table]) -> Pairs:
        """Make inputs and targets of each split."""
        size = self.options.image_size or self.source.image_size
        if self.task.whole_images or self.source.train.targets.kind.placed:
            return self._whole(tables, size)
        crop_pct = self.options.crop_pct
        size, pixels = _pixels(tables, self.source.in_chans, size, crop_pct or 1.0)
        self._notes += _resized(tables.values(), size)
        return {
            name: (
                ImagesOneByOne(table, size, self.source.in_chans, crop_pct or LAZY_CROP_PCT)
                if (kept := pixels[name]) is None
                else ImagesInMemory(table, torch.from_numpy(kept), crop_pct or 1.0),
                table.targets,
            )
            for name, table in tables.items()
        }

    def notes(self, parts: Mapping[str, Part]) -> list[str]:
        """Tell what was done, a sentence each."""
        del parts
        return self._notes

    def facts(self, facts: DataFacts) -> DataFacts:
        """Add what only data of this kind have."""
        return facts

    def _whole(self, tables: Mapping[str, Table], size: Size | None) -> Pairs:
        """Make images of which all is seen, with targets that follow them."""
        sizes = {name: _sizes(table) for name, table in tables.items()}
        every = sorted({each for found in sizes.values() for each in found})
        own = size is None and self.task.whole_images
        if own:
            size = max(each[0] for each in every), max(each[1] for each in every)
            self._notes.append(
                f"{self.source.items} keep their own sizes; the largest height is {size[0]} and "
                f"the largest width {size[1]} pixels"
            )
        elif size is None:
            size = every[0] if len(every) == 1 else DEFAULT_SIZE
        targets = self.source.train.targets
        if not own and every != [size] and targets.kind.placed and not targets.moves:
            raise UserError(
                f"data {self.spec}: images whose {targets.kind.nouns} cannot be moved are not "
                "resized. Leave data.image_size out, or make the targets tv_tensors of torchvision."
            )
        return {
            name: (
                WholeImages(
                    table,
                    size,
                    self.source.in_chans,
                    own_sizes=own,
                    listed=self.task.whole_images,
                ),
                table.targets if own else table.targets.resized(sizes[name], size),
            )
            for name, table in tables.items()
        }


def _sizes(table: Table) -> list[Size]:
    """Read the size of every image off its header."""

    def look(rows: range) -> list[Size]:
        return [header_size(table, i) for i in rows]

    return [size for part in in_chunks(len(table), look) for size in part]


def _pixels(
    tables: Mapping[str, Table], in_chans: int, wanted: Size | None, crop_pct: float
) -> tuple[Size, dict[str, NDArray[np.uint8] | None]]:
    """Decode all images of a small set; check the headers of a large one."""
    count = sum(map(len, tables.values()))

    def small(size: Size) -> bool:
        return max(size) <= CACHE_SIDE and count * in_chans * size[0] * size[1] < CACHE_BYTES

    size = wanted
    if (
        size is None
    ):  # the common size; where all are small, decoding finds out whether there is one
        size = header_size(tables["train"], 0)
        if small(size):
            pixels = {
                name: decode_all(table, size, in_chans, crop_pct=crop_pct, only_this_size=True)
                for name, table in tables.items()
            }
            if all(kept is not None for kept in pixels.values()):
                return size, pixels
        sizes = header_sizes(list(tables.values()))
        size = sizes.pop() if len(sizes) == 1 else DEFAULT_SIZE
    elif not small(size):
        header_sizes(list(tables.values()))
    if not small(size):
        return size, dict.fromkeys(tables)
    return size, {
        name: decode_all(table, size, in_chans, crop_pct=crop_pct) for name, table in tables.items()
    }


def _resized(tables: Iterable[Table], size: Size) -> list[str]:
    """Note that images which a source has as pixels got another size."""
    own = {kept.shape[2:] for table in tables if (kept := table.held) is not None}
    return [
        f"images of {own_size[0]}x{own_size[1]} pixels resized to {size[0]}x{size[1]} (bicubic)"
        for own_size in own - {size}
    ]
