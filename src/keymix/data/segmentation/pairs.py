# SPDX-License-Identifier: Apache-2.0
"""Image files with mask files of the same name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.decode import DAMAGE, SIXTEEN_BIT, Size, convert, open_image, reason, to_array
from keymix.data.kinds import IGNORE
from keymix.data.regular import regular
from keymix.data.segmentation.table import Pixels, ScanTable, Seen, refuse
from keymix.data.sources.base import Fault, head_digest, some
from keymix.data.streams import IntArray

_ONE_CHANNEL = ("1", "L", "P", *SIXTEEN_BIT)
_HEAD = 1 << 15  # bytes of each file that enter the fingerprint of a large set


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """An image and its mask."""

    stem: str  # name of both without suffix
    images: tuple[Path, ...]  # the image's file; several or none are a fault
    # the mask's file, or one of each class; None where it is missing
    masks: tuple[Path | None, ...]
    wanted: tuple[Path, ...]  # where the masks should be
    group: str  # what stays in one split


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What the values of masks mean."""

    classes: int
    multilabel: bool  # whether each class has a mask of its own, of 0 and anything else
    background: int | None  # number of the class that is no foreground; None for none


class Pairs(ScanTable):
    """Image files with mask files."""

    def __init__(self, pairs: Sequence[Pair], meaning: Meaning, channels: int) -> None:
        self.pairs = pairs
        self.meaning = meaning
        self.channels = channels
        self.labels = np.zeros(len(pairs), dtype=np.int64)
        self.groups = tuple(pair.group for pair in pairs)

    def select(self, rows: IntArray) -> Pairs:
        """Keep some pairs."""
        return Pairs([self.pairs[i] for i in rows.tolist()], self.meaning, self.channels)

    def name(self, i: int) -> str:
        """Give the image's file, or the mask's if there is none."""
        pair = self.pairs[i]
        there = [*pair.images, *(mask for mask in pair.masks if mask is not None)]
        return str(there[0])

    def scan_id(self, i: int) -> str:
        """Give the file's name without suffix."""
        return self.pairs[i].stem

    def numbered(self, i: int) -> str:
        """Give the file's name without suffix."""
        return self.pairs[i].stem

    def open(self, i: int) -> Image.Image:
        """Open the image."""
        if not self.pairs[i].images:
            raise FileNotFoundError(2, "the image is missing", self.name(i))
        return open_image(self.pairs[i].images[0])

    def size(self, i: int) -> Size:
        """Tell height and width by the image's header."""
        refuse(self._unpaired(i))
        try:
            with self.open(i) as image:
                return image.height, image.width
        except DAMAGE as error:
            refuse([self._unreadable(i, error)])
            raise

    def pixels(self, i: int) -> Pixels:
        """Decode the image, grey or RGB, as `keymix.data.decode.convert` does."""
        refuse(self._unpaired(i))
        try:
            with self.open(i) as image:
                return to_array(convert(image, self.channels))
        except DAMAGE as error:
            refuse([self._unreadable(i, error)])
            raise

    def mask(self, i: int) -> Pixels:
        """Read the mask: class numbers, or a plane of 0 and 1 for each class."""
        refuse(self._unpaired(i))
        mask, faults = self._mask(i, self.size(i))
        refuse(faults)
        assert mask is not None
        return mask

    def inspect(self, i: int, *, decode: bool = True) -> Seen:
        """Find all that is wrong with the two files; the mask is always decoded."""
        faults = self._unpaired(i)
        if faults:
            return Seen(faults=faults)
        size = None
        try:
            with self.open(i) as image:
                size = (image.height, image.width)
                if decode:
                    convert(image, self.channels)
                else:
                    image.verify()
        except DAMAGE as error:
            faults.append(self._unreadable(i, error))
        mask, of_mask = self._mask(i, size)
        if mask is None:
            return Seen(faults=[*faults, *of_mask])
        found = self._classes(mask)
        return Seen(
            faults=faults,
            empty=found <= {self.meaning.background},
            classes=found,
            ignored=not self.meaning.multilabel and bool((mask == IGNORE).any()),
        )

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash names, lengths and, with ``content``, the first 32 KiB of each file."""
        pair = self.pairs[i]
        head, length = pair.stem.encode(), 0
        for path in (*pair.images, *pair.masks):
            if path is None:
                continue
            size = path.stat().st_size
            length += size
            head += f"\n{path.name} {size}\n".encode()
            if content:
                with regular(path).open("rb") as stream:
                    head += stream.read(_HEAD)
        return head_digest(length, head)

    def _unpaired(self, i: int) -> list[Fault]:
        """Say which of the two files is missing or there twice."""
        pair = self.pairs[i]
        if not pair.images:
            told = f"{self.name(i)}: the mask has no image of its name"
            return [Fault("missing image", told, self.name(i))]
        if len(pair.images) > 1:
            told = f"images of one stem: {some([str(path) for path in pair.images])}"
            return [Fault("images of one stem", told, self.name(i))]
        return [
            Fault("missing mask", f"{self.name(i)}: its mask {wanted} is missing", self.name(i))
            for path, wanted in zip(pair.masks, pair.wanted, strict=True)
            if path is None
        ]

    def _unreadable(self, i: int, error: Exception) -> Fault:
        told = f"cannot read image {self.name(i)}: {reason(error)}"
        return Fault("unreadable image", told, self.name(i))

    def _mask(self, i: int, size: Size | None) -> tuple[Pixels | None, list[Fault]]:
        """Read the mask of an image of a known size, or say what is wrong with it."""
        planes: list[Pixels] = []
        faults: list[Fault] = []
        for path in self.pairs[i].masks:
            assert path is not None
            values = _values(path)
            if isinstance(values, Fault):
                faults.append(values)
                continue
            if size is not None and values.shape != size:
                told = (
                    f"{path} has {values.shape[1]}x{values.shape[0]} pixels, its image "
                    f"{size[1]}x{size[0]}"
                )
                faults.append(Fault("size unlike the image", told, str(path)))
                continue
            if self.meaning.multilabel:
                planes.append((values != 0).astype(np.uint8))
                continue
            wrong = self._undeclared(path, values)
            faults += wrong
            if not wrong:
                planes.append(values.astype(np.uint8))
        if faults:
            return None, faults
        return (np.stack(planes) if self.meaning.multilabel else planes[0]), []

    def _undeclared(self, path: Path, values: NDArray[Any]) -> list[Fault]:
        outside = (values < 0) | (values >= self.meaning.classes)
        outside &= values != IGNORE
        if not outside.any():
            return []
        found, counts = np.unique(values[outside], return_counts=True)
        wrong = list(zip(found.tolist(), counts.tolist(), strict=True))
        listed = some([f"{value} ({count} pixels)" for value, count in wrong], 3)
        told = (
            f"{path} has values that classes.txt does not declare: {listed}; it declares 0 to "
            f"{self.meaning.classes - 1}, and {IGNORE} is ignored"
        )
        return [Fault("undeclared value", told, str(path))]

    def _classes(self, mask: Pixels) -> frozenset[int]:
        """Number the classes that any pixel has."""
        if self.meaning.multilabel:
            return frozenset(np.flatnonzero(mask.any(axis=(1, 2))).tolist())
        return frozenset(np.unique(mask).tolist()) - {IGNORE}


def _values(path: Path) -> NDArray[Any] | Fault:
    """Read the values of a mask, those of a palette as its numbers."""
    try:
        with open_image(path) as image:
            if image.mode not in _ONE_CHANNEL:
                told = f"{path} is {image.mode}: a mask has one channel with the class numbers"
                return Fault("colour mask", told, str(path))
            values: NDArray[Any] = np.asarray(image)
            return values.astype(np.uint8) if image.mode == "1" else values
    except DAMAGE as error:
        return Fault("unreadable mask", f"cannot read mask {path}: {reason(error)}", str(path))
