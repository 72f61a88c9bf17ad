# SPDX-License-Identifier: Apache-2.0
"""What a source is: tables of images with their targets, opened by number."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.kinds import IMAGE, InputKind
from keymix.data.streams import IntArray
from keymix.data.targets import ClassTargets, Targets
from keymix.errors import UserError

_REMEDY = (
    "Correct it, or leave such {items} out with --data.skip_corrupt true; `keymix data check` "
    "names them all."
)
REMEDY = _REMEDY.format(items="images")
"""What to do about a fault of an image or its target."""
_STRETCH = 1024
_HEAD = 1 << 16  # bytes of an encoded image that enter the fingerprint of a large set


class Table(ABC):
    """Images that are opened by number, with their targets: class numbers, or what a table has.

    ``labels`` are class numbers, the strata of other targets. ``in_memory`` are all images as uint8
    ``[N, C, H, W]`` in a table that has them decoded already. ``white_level`` is the 16-bit value
    that becomes white, None for 65,535.
    """

    labels: IntArray
    in_memory: NDArray[np.uint8] | None = None
    white_level: int | None = None

    @property
    def targets(self) -> Targets:
        """What a model is to learn of the images, by position."""
        return ClassTargets(self.labels)

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def name(self, i: int) -> str:
        """Say where image ``i`` stands, so that a person finds it: a file, or a file and a row."""

    def numbered(self, i: int) -> str:
        """Name image ``i`` as whoever stored it may have numbered it, without a split's folder.

        Empty where images have no names of their own.
        """
        del i
        return ""

    def key(self, i: int) -> str:
        """Name image ``i`` for choices by hash: the same wherever the data lie, where it can be."""
        return self.numbered(i) or self.name(i)

    @abstractmethod
    def open(self, i: int) -> Image.Image:
        """Open image ``i`` without decoding it. Pillow's errors pass through."""

    @abstractmethod
    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash enough of the encoded image ``i`` to notice another one in its place.

        Args:
            i: The image.
            content: Whether some of its content is read from disk for it.
        """

    @abstractmethod
    def select(self, rows: IntArray) -> Table:
        """Make the table of ``rows`` (ascending); a source may read what it needs for them here."""

    def set_rows(self, index: IntArray) -> IntArray:
        """Return the rows of images in the set that this table is a view of."""
        return index

    def parts(self) -> Iterator[tuple[IntArray, Table | UserError]]:
        """Read the table part by part, in order, where each image is looked at once.

        Yields the rows of a part, and their table or why they cannot be read.
        """
        for start in range(0, len(self), _STRETCH):
            rows = np.arange(start, min(len(self), start + _STRETCH), dtype=np.int64)
            yield rows, self.select(rows)


@dataclass(frozen=True)
class Fault:
    """Something wrong with the data as a whole."""

    kind: str  # what, in a few words that are the same for all faults of the kind
    message: str  # the line for the user, with culprit and remedy
    culprit: str  # the folder, file or row alone


def refuse(faults: Iterable[Fault], items: str = "images") -> None:
    """Raise the first fault, with what to do about it; `items` are what would be left out."""
    for fault in faults:
        raise UserError(f"{fault.message.rstrip('.')}. {_REMEDY.format(items=items)}")


class Faults:
    """What to do about faults of the data: raise the first, or collect them and continue.

    Args:
        collect: Collect them.
    """

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.found: list[Fault] = []
        self.strangers: list[str] = []
        self.hidden = 0  # images in hidden folders

    def report(self, kind: str, culprit: object, message: str) -> None:
        """Take a fault that training must not meet.

        Raises:
            UserError: With the message, unless faults are collected.
        """
        if not self.collect:
            raise UserError(message)
        self.found.append(Fault(kind, message, str(culprit)))

    def stranger(self, file: object) -> None:
        """Take a file among the images that is none by its name."""
        if self.collect:
            self.strangers.append(str(file))


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a source offers before anything is split.

    Args:
        classes: Names of the classes; labels are positions in it. None where targets are others.
        train: The images to learn from.
        val: The source's own validation split, if it has one.
        test: The source's own test split, if it has one.
        in_chans: Channels of an image, 1 or 3.
        image_size: Height and width that images get where the user names no size; None takes their
            own.
        test_fraction: Share of ``train`` split off as test where the source has no split for it.
        notes: What a reader of a result should know about the source.
        grouped: Whether the groups of targets that have groups are the data's own; otherwise each
            input is one by itself.
    """

    kind: ClassVar[InputKind] = IMAGE
    preparation: ClassVar[str] = "keymix.data.loading:Preparation"
    """Where loading the splits is said, ``module:class``."""
    looked: ClassVar[str] = "keymix.data.looks:look_at_images"
    """Where a check's look at inputs is said, ``module:function``."""
    checked_fraction: ClassVar[float] = 0.1
    """Share that becomes validation in a check, as in recipes for such data."""

    classes: tuple[str, ...] = ()
    train: Table
    val: Table | None = None
    test: Table | None = None
    in_chans: int = 3
    image_size: tuple[int, int] | None = None
    test_fraction: float = 0.2
    notes: tuple[str, ...] = ()
    grouped: bool = True

    @property
    def items(self) -> str:
        """What its inputs are called."""
        return self.kind.nouns

    @property
    def tables(self) -> dict[str, Table]:
        """The tables that there are, by name."""
        given = {"train": self.train, "val": self.val, "test": self.test}
        return {name: table for name, table in given.items() if table is not None}


def check_count(what: str, count: int, targets: Targets) -> None:
    """Refuse targets of another number than the inputs."""
    if len(targets) != count:
        raise UserError(
            f"{what}: {count} inputs, but {len(targets)} {targets.kind.nouns}. Give one for each."
        )


def head_digest(length: int, head: bytes) -> bytes:
    """Hash an encoded image's length and its first 64 KiB."""
    return hashlib.sha256(length.to_bytes(8, "little") + head[:_HEAD]).digest()


def some(names: Sequence[str], most: int = 5) -> str:
    """List a few names and say how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


class Arrays(Table):
    """Images as one array."""

    in_memory: NDArray[np.uint8]

    def __init__(
        self,
        what: str,
        pixels: NDArray[np.uint8],
        targets: IntArray | Targets,
        rows: IntArray | None = None,
    ) -> None:
        self._targets = ClassTargets(targets) if isinstance(targets, np.ndarray) else targets
        self.labels = self._targets.strata
        self.in_memory = pixels
        self._what = what
        self._rows = np.arange(len(pixels), dtype=np.int64) if rows is None else rows
        check_count(what, len(pixels), self._targets)

    @property
    def targets(self) -> Targets:
        """What a model is to learn of the images."""
        return self._targets

    def name(self, i: int) -> str:
        """Name the set and the row."""
        return f"{self._what} image {self._rows[i]}"

    def open(self, i: int) -> Image.Image:
        """Wrap the pixels of image ``i``."""
        pixels = self.in_memory[i]
        return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash the pixels of image ``i``; they are in memory, whatever ``content`` says."""
        return hashlib.sha256(self.in_memory[i].tobytes()).digest()

    def select(self, rows: IntArray) -> Table:
        """Copy the pixels of ``rows``."""
        return Arrays(
            self._what, self.in_memory[rows], self._targets.select(rows), self._rows[rows]
        )
