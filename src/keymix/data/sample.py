# SPDX-License-Identifier: Apache-2.0
"""A sample is a row: where it comes from, how its image is read, and what a model learns of it.

A source (`keymix.data.specs.source`) is a function that lists rows. A list serves; of very many
rows a `Sequence` that builds them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.kinds import IMAGE, InputKind
from keymix.data.record import DataFacts
from keymix.data.streams import IntArray
from keymix.errors import UserError

Size = tuple[int, int]  # height, width
SPLITS = ("train", "val", "test")
_REMEDY = (
    "Correct it, or leave such {items} out with --data.skip_corrupt true; `keymix data check` "
    "names them all."
)
REMEDY = _REMEDY.format(items="images")
"""What to do about a fault of an image or its target."""


@dataclass(frozen=True)
class Fault:
    """Something wrong with the data."""

    culprit: str  # the folder, file or row alone
    message: str  # the line for the user, with culprit and remedy


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

    def report(self, culprit: object, why: str) -> None:
        """Take a fault that training must not meet.

        Args:
            culprit: The folder, file or row.
            why: What is wrong with it, and what to do, in sentences.

        Raises:
            UserError: With both in a line, unless faults are collected.
        """
        if not self.collect:
            raise UserError(f"{culprit}: {why}")
        self.found.append(Fault(str(culprit), f"{culprit}: {why}"))

    def stranger(self, file: object) -> None:
        """Take a file among the images that is none by its name."""
        self.strangers.append(str(file))


class BadSampleError(UserError):
    """What is wrong with a sample, with its faults."""

    def __init__(self, faults: Sequence[Fault], items: str = "images") -> None:
        self.faults = tuple(faults)
        super().__init__(f"{faults[0].message.rstrip('.')}. {_REMEDY.format(items=items)}")

    def __reduce__(self) -> Any:
        """Travel from a worker with the message alone."""
        return UserError, (str(self),)


def refuse(faults: Iterable[Fault], items: str = "images") -> None:
    """Raise the faults if there are any, with what to do about the first."""
    if found := [*faults]:
        raise BadSampleError(found, items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample.

    Args:
        id: Where it stands, so that a person finds it: a file, or a file and a row.
        image: Reads the image, ``[C, H, W]``: uint8, uint16 (grey), or float32 of which 1 is white;
            the frames of a recording are counts ``[T, 2, H, W]``. A `Stored` image can also be
            looked at without being decoded.
        target: A class number; another number or numbers; a tv_tensor of torchvision (``Mask``,
            ``BoundingBoxes``, ``KeyPoints``) or a mapping of tensors, which move with their image;
            `keymix.data.instances.Instances`. Or a function that reads one of these.
        split: The data's own split, ``train``, ``val`` or ``test``; empty for train, from which
            splits that the data lack are drawn.
        group: What it is of, such as a patient: rows of a group stay in one split. Of some rows
            all have one.
        name: What whoever stored it called it, without suffix and without the folder of a split;
            empty where rows have no names of their own. Frames of sequences are found by it, and
            predictions are named by it.
        spacing: Millimetres from row to row of pixels and from column to column; None if unknown.
        faults: What the source found wrong with it.
    """

    id: str
    image: Callable[[], Tensor]
    target: Any
    split: str = ""
    group: str = ""
    name: str = ""
    spacing: tuple[float, float] | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def key(self) -> str:
        """What choices by hash are made by: the same wherever the data lie, where it can be."""
        name = self.name or self.id
        return f"{self.group}/{name}" if self.group else name

    def read_target(self) -> Any:
        """Read the target; numbers are tensors, whole ones int64 and others float32."""
        found = self.target() if callable(self.target) else self.target
        if isinstance(found, np.ndarray | np.generic | int | float):
            array = np.asarray(found)
            whole = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
            return torch.tensor(array.astype(np.int64 if whole else np.float32))
        return found


class Stored(ABC):
    """An image in storage, which can be looked at before it is decoded."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """Decode it.

        Raises:
            UserError: If it is damaged; it is named.
        """

    @abstractmethod
    def check(self, *, decode: bool) -> Size:
        """Look for damage, in the header or in all of it, and return height and width.

        What decoders raise passes through (`keymix.data.decode.DAMAGE`).
        """

    @abstractmethod
    def digest(self, *, content: bool = True) -> bytes:
        """Hash enough of it to notice another one in its place.

        Args:
            content: Whether some of its content is read from disk for it.
        """


def digest_of(image: Callable[[], Tensor], *, content: bool = True) -> bytes:
    """Hash an image, stored or not."""
    if isinstance(image, Stored):
        return image.digest(content=content)
    return hashlib.sha256(image().contiguous().numpy().tobytes()).digest()


def size_of(image: Callable[[], Tensor], *, decode: bool = False) -> Size:
    """Return height and width of an image, after a look for damage."""
    if isinstance(image, Stored):
        return image.check(decode=decode)
    height, width = image().shape[-2:]
    return height, width


def select(rows: Sequence[Row], index: IntArray) -> Sequence[Row]:
    """Keep some rows, ascending; a sequence may have a ``select`` that reads what they need."""
    own = getattr(rows, "select", None)
    if own is not None:
        return cast("Sequence[Row]", own(index))
    return [rows[i] for i in index.tolist()]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a source offers before anything is split.

    Args:
        rows: The samples.
        classes: Names of the classes; class numbers are positions in it. None where targets are
            others.
        kind: The kind of input.
        in_chans: Channels of an image, 1 or 3, or the slices of a stack.
        image_size: Height and width that images get where the user names no size; None takes their
            own.
        test_fraction: Share of train split off as test where the source has no split for it.
        notes: What a reader of a result should know about the source.
        grouped: Whether the groups of rows that have groups are the data's own; otherwise each row
            is one by itself.
        facts: What the source knows of the record of the data.
        found: What the source found that does not stop training: level and items by kind of
            finding (`keymix.data.findings`).
        loose: What is wrong with the data, but with no row; training refuses it, or goes without
            if broken images are left out.
        stream: The training images where they are read in order while training
            (`keymix.data.shards.Shards`); the rows are validation and test then.
    """

    rows: Sequence[Row]
    classes: tuple[str, ...] = ()
    kind: InputKind = IMAGE
    in_chans: int = 3
    image_size: Size | None = None
    test_fraction: float = 0.2
    notes: tuple[str, ...] = ()
    grouped: bool = True
    facts: DataFacts = field(default_factory=DataFacts)
    found: Mapping[str, tuple[str, Sequence[Any]]] = field(default_factory=dict)
    loose: tuple[Fault, ...] = ()
    stream: Sequence[Row] | None = None

    def by_position(self, spec: str) -> Source:
        """Return it, or refuse a stream where all samples are looked at."""
        if self.stream is not None:
            raise UserError(
                f"data {spec} is a stream, which `keymix train`, `eval` and `predict` take. Name "
                "the data that its shards were made of, or parquet:PATH."
            )
        return self

    @property
    def items(self) -> str:
        """What its inputs are called."""
        return self.kind.nouns


def array_rows(
    what: str, pixels: NDArray[Any], targets: Sequence[Any] | NDArray[Any], split: str = ""
) -> list[Row]:
    """Make rows of images in memory.

    Args:
        what: What they are called, before their number.
        pixels: ``[N, C, H, W]``.
        targets: The target of each.
        split: The data's own split of all of them.

    Raises:
        ValueError: If there are not as many targets as images.
    """
    if isinstance(targets, np.ndarray) and targets.ndim == 1:
        targets = targets.tolist()
    return [
        Row(id=f"{what} image {i}", image=partial(_image, pixels, i), target=target, split=split)
        for i, (_, target) in enumerate(zip(pixels, targets, strict=True))
    ]


def _image(pixels: NDArray[Any], i: int) -> Tensor:
    return torch.from_numpy(pixels[i].copy())


def some(names: Sequence[str], most: int = 5) -> str:
    """List a few names and say how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
