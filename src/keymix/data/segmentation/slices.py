# SPDX-License-Identifier: Apache-2.0
"""Slices of scans: 16-bit files, their neighbours as channels, and masks of run lengths."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    Size,
    convert,
    open_image,
    reading,
    reason,
    to_array,
)
from keymix.data.files import regular
from keymix.data.segmentation import rle
from keymix.data.segmentation.table import Pixels, ScanTable, Seen
from keymix.data.sources.base import REMEDY, Fault, head_digest, refuse
from keymix.data.streams import IntArray
from keymix.errors import UserError

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
DAY = re.compile(r"(case[0-9]+)_day([0-9]+)")
FILE = re.compile(rf"slice_([0-9]+)_([1-9][0-9]*)_([1-9][0-9]*)_{_NUMBER}_{_NUMBER}\.png")
"""Names of a day's folder and of a slice's file: number, width, height, spacing across, down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A slice of a scan."""

    id: str  # its name in the table of masks
    case: str
    day: str
    number: int  # of the slice in the scan
    file: str | None  # below the root; None if it is missing
    size: Size  # height and width by the file's name, pixels
    # millimetres from row to row and from column to column; None where unknown
    spacing: tuple[float, float] | None
    # number of an organ and its runs, for each organ that is there
    runs: tuple[tuple[int, rle.Runs], ...]
    faults: tuple[Fault, ...]  # what is wrong with the rows and the name
    listed: frozenset[str] = frozenset()  # the organs that have a row, with run lengths or without


Numbers = Mapping[int, Sequence[str]]
"""Files of a scan by the number of the slice."""


@dataclass(eq=False)
class SliceSet:
    """All slices of a data set, whatever split they are in."""

    root: Path
    slices: Sequence[Slice]  # the slices with masks
    # files of all slices, with masks or without, by case and day
    files: Mapping[tuple[str, str], Numbers]
    organs: int
    # what is wrong with a file, once it was looked at; and whether it was decoded
    looked: dict[tuple[str, bool], Fault | None] = field(default_factory=dict)

    def neighbours(self, of: Slice, count: int) -> tuple[list[str], int]:
        """List the files of a stack in the order of their numbers, ``of`` in the middle.

        For a neighbour that is missing, the nearest slice on the way to it stands in.

        Returns the files, and for how many of them another one stands in.
        """
        assert of.file is not None
        numbers = self.files[of.case, of.day]
        found: list[str] = []
        replaced = 0
        for step in range(-(count // 2), count // 2 + 1):
            near = step
            while near and of.number + near not in numbers:
                near -= 1 if step > 0 else -1
            replaced += near != step
            found.append(numbers[of.number + near][0] if near else of.file)
        return found, replaced

    def look(self, file: str, size: Size, *, decode: bool) -> Fault | None:
        """Say what is wrong with a file whose name gives the size."""
        key = (file, decode)
        if key not in self.looked:
            self.looked[key] = self._look(file, size, decode)
        return self.looked[key]

    def _look(self, file: str, size: Size, decode: bool) -> Fault | None:
        path = self.root / file
        try:
            with open_image(path) as image:
                found = (image.height, image.width)
                _check_mode(image)
                if decode:
                    image.load()
                else:
                    image.verify()
        except DAMAGE as error:
            message = f"cannot read image {path}: {reason(error)}"
            return Fault("unreadable", message, str(path))
        if found != size:
            message = (
                f"{path} has {found[1]}x{found[0]} pixels, not the {size[1]}x{size[0]} of its name"
            )
            return Fault("wrong size", message, str(path))
        return None


class Slices(ScanTable):
    """Slices with masks, some of a set or all."""

    def __init__(
        self, whole: SliceSet, *, multilabel: bool, channels: int, rows: IntArray | None = None
    ) -> None:
        self.rows = np.arange(len(whole.slices), dtype=np.int64) if rows is None else rows
        self.whole = whole
        self.channels, self.stacked = channels, channels > 1
        self._multilabel = multilabel
        self._slices: list[Slice] = [whole.slices[row] for row in self.rows.tolist()]
        self.labels = np.zeros(len(self.rows), dtype=np.int64)
        self.groups = tuple(each.case for each in self._slices)

    def select(self, rows: IntArray) -> Slices:
        """Make the view of some rows."""
        return Slices(
            self.whole,
            multilabel=self._multilabel,
            channels=self.channels,
            rows=self.rows[rows],
        )

    def name(self, i: int) -> str:
        """Give the slice's file, or its id if that is missing."""
        file = self._slices[i].file
        return self._slices[i].id if file is None else str(self.whole.root / file)

    def scan_id(self, i: int) -> str:
        """Give the slice's id in the table of masks."""
        return self._slices[i].id

    def size(self, i: int) -> Size:
        """Return height and width by the file's name."""
        return self._slices[i].size

    def spacing(self, i: int) -> tuple[float, float] | None:
        """Return the millimetres from row to row and from column to column, by the file's name."""
        return self._slices[i].spacing

    def open(self, i: int) -> Image.Image:
        """Open the slice's own file."""
        one = self._slices[i]
        if one.file is None:
            raise FileNotFoundError(2, "the scan is missing", one.id)
        return open_image(self.whole.root / one.file)

    def pixels(self, i: int) -> Pixels:
        """Decode the slice and its neighbours, each scaled from its least and largest to 0..255.

        A slice of one value is 0.
        """
        one = self._slices[i]
        refuse([fault for fault in one.faults if one.file is None])
        files, _ = self.whole.neighbours(one, self.channels)
        planes = {}
        for file in dict.fromkeys(files):
            path = self.whole.root / file
            try:
                with open_image(path) as image:
                    _check_mode(image)
                    planes[file] = scaled(np.asarray(image))
            except DAMAGE as error:
                message = f"cannot read image {path}: {reason(error)}"
                refuse([Fault("unreadable", message, str(path))])
            if planes[file].shape != one.size:
                refuse(self.inspect(i, decode=False).faults)
        return np.stack([planes[file] for file in files])

    def mask(self, i: int) -> Pixels:
        """Fill the runs."""
        one = self._slices[i]
        refuse(one.faults)
        if self._multilabel:
            planes = np.zeros((self.whole.organs, *one.size), dtype=np.uint8)
            for organ, runs in one.runs:
                planes[organ] = rle.filled(runs, *one.size)
            return planes
        mask = np.zeros(one.size, dtype=np.uint8)
        for organ, runs in one.runs:
            mask[rle.filled(runs, *one.size)] = organ + 1
        return mask

    def inspect(self, i: int, *, decode: bool = True) -> Seen:
        """Find all that is wrong with the slice's rows, its file and those of its neighbours."""
        one = self._slices[i]
        if one.file is None:
            return Seen(faults=one.faults, empty=not one.runs)
        found = list(one.faults)
        files, replaced = self.whole.neighbours(one, self.channels)
        for file in dict.fromkeys([one.file, *files]):
            size = size_of(file)
            fault = self.whole.look(file, size, decode=decode)
            if fault is not None:
                found.append(fault)
            elif size != one.size:
                path = self.whole.root / file
                message = (
                    f"{path} has another size than its neighbour in the stack, "
                    f"{self.whole.root / one.file}"
                )
                found.append(Fault("wrong size", message, str(path)))
        overlap = 0
        covered = sum(int((runs[1] - runs[0]).sum()) for _, runs in one.runs)
        if not self._multilabel and len(one.runs) > 1:
            organs = [rle.filled(runs, *one.size) for _, runs in one.runs]
            overlap = int((np.sum(organs, axis=0, dtype=np.uint8) > 1).sum())
            covered = int(np.any(organs, axis=0).sum())
        classes = {organ + (not self._multilabel) for organ, _ in one.runs}
        if not self._multilabel and covered < one.size[0] * one.size[1]:
            classes.add(0)
        return Seen(
            faults=found,
            empty=not one.runs,
            overlap=overlap,
            replaced=replaced,
            classes=frozenset(classes),
        )

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash runs, names of the stack, length and, with ``content``, the file's first 64 KiB."""
        one = self._slices[i]
        if one.file is None:
            return hashlib.sha256(one.id.encode()).digest()
        files, _ = self.whole.neighbours(one, self.channels)
        whole = hashlib.sha256("\n".join([one.id, one.file, *files]).encode())
        for organ, runs in one.runs:
            whole.update(f"\n{organ}\n".encode() + runs.astype("<i8").tobytes())
        path = self.whole.root / one.file
        head = b""
        if content:
            with regular(path).open("rb") as stream:
                head = stream.read(1 << 16)
        return head_digest(path.stat().st_size, whole.digest() + head)


def size_of(file: str) -> Size:
    """Return height and width by the name of a slice's file: number, width, height, spacing."""
    width, height = file.rpartition("/")[2].split("_")[2:4]
    return int(height), int(width)


def spacing_of(file: str) -> tuple[float, float] | None:
    """Return the millimetres from row to row and from column to column by a file's name."""
    across, down = file.removesuffix(".png").rpartition("/")[2].split("_")[4:6]
    found = (float(down), float(across))
    return found if min(found) > 0 else None


def _check_mode(image: Image.Image) -> None:
    if image.mode not in ("L", *SIXTEEN_BIT):
        raise ValueError(f"its pixels are {image.mode}, not grey of 16 or 8 bits")


def scaled(values: NDArray[Any]) -> Pixels:
    """Scale a slice from its least and largest value to 0..255; one of a single value is 0."""
    low, high = int(values.min()), int(values.max())
    if low == high:
        return np.zeros(values.shape, dtype=np.uint8)
    full: Pixels = np.rint((values.astype(np.float64) - low) * (255 / (high - low))).astype(
        np.uint8
    )
    return full


@dataclass(frozen=True, kw_only=True)
class ScanFile:
    """An image file."""

    path: Path  # the file. In ``caseN_dayN/scans/slice_….png`` its names give its id and spacing
    # whether the run was trained on slices of scans, which are scaled from their least and
    # largest value, and not on images of 8 bits
    slices: bool
    channels: int  # 1 for grey, 3 for colour, or the slices of a stack

    @property
    def id(self) -> str:
        """Name the image as a table of masks does: by case, day and slice, or by its file."""
        name, day = FILE.fullmatch(self.path.name), DAY.fullmatch(self._day)
        if not self.slices or name is None or day is None:
            return self.path.stem
        return f"{day[0]}_slice_{name[1]}"

    @property
    def spacing(self) -> tuple[float, float] | None:
        """Millimetres from row to row and from column to column; None where no name gives them."""
        named = self.slices and FILE.fullmatch(self.path.name) is not None
        return spacing_of(self.path.name) if named else None

    def pixels(self) -> Pixels:
        """Decode the image at its own size, with its neighbours if it is one of a stack.

        Shape: uint8 ``[C, h, w]``.
        """
        if not self.slices:
            with reading(str(self.path)), open_image(self.path) as image:
                return to_array(convert(image, self.channels))
        one, numbers = self._slice()
        whole = SliceSet(self.path.parent, [one], {(one.case, one.day): numbers}, 0)
        try:
            return Slices(whole, multilabel=False, channels=self.channels).pixels(0)
        except UserError as error:
            raise UserError(str(error).replace(REMEDY, "Replace or remove it.")) from error

    @property
    def _day(self) -> str:
        """Name of the folder of a day's scans."""
        parent = self.path.absolute().parent
        return parent.parent.name if parent.name == "scans" else ""

    def _slice(self) -> tuple[Slice, dict[int, list[str]]]:
        """Make a slice of the file, and list the files next to it by number."""
        name = FILE.fullmatch(self.path.name)
        if name is None and self.channels > 1:
            raise UserError(
                f"{self.path}: the run was trained on stacks of {self.channels} slices, and this "
                "name has no number by which to find its neighbours. Name it like "
                "slice_0078_266_266_1.50_1.50.png."
            )
        if name is None:
            with reading(str(self.path)), open_image(self.path) as image:
                size = (image.height, image.width)
        else:
            size = (int(name[3]), int(name[2]))
        number = 0 if name is None else int(name[1])
        numbers: dict[int, list[str]] = {}
        if self.channels > 1:
            for file in sorted(path.name for path in self.path.parent.iterdir()):
                if (match := FILE.fullmatch(file)) is not None:
                    numbers.setdefault(int(match[1]), []).append(file)
        numbers[number] = [self.path.name]
        one = Slice(
            id=self.id,
            case="",
            day="",
            number=number,
            file=self.path.name,
            size=size,
            spacing=self.spacing,
            runs=(),
            faults=(),
        )
        return one, numbers
