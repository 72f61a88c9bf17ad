# SPDX-License-Identifier: Apache-2.0
"""Slices of scans: 16-bit files, of which neighbours are the channels of an image.

A slice's file is called ``slice_0078_266_266_1.50_1.50.png``: number of the slice, width and height
in pixels (columns, then rows), width and height of a pixel in millimetres.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    head_digest,
    open_image,
    reason,
)
from keymix.data.sample import BadSampleError, Fault, Size, Stored, refuse
from keymix.errors import UserError

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
DAY = re.compile(r"(case[0-9]+)_day([0-9]+)")
FILE = re.compile(rf"slice_([0-9]+)_([1-9][0-9]*)_([1-9][0-9]*)_{_NUMBER}_{_NUMBER}\.png")
"""Names of a day's folder and of a slice's file."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Stack(Stored):
    """A slice with its neighbours as channels, each scaled to 0..255."""

    files: tuple[Path, ...]  # in order, the slice's own in the middle
    size: Size | None  # height and width that all have; None for those of a lone file
    window: tuple[float, float] | None = None  # values that become 0 and 255; None for the own

    @property
    def own(self) -> Path:
        """The slice's own file."""
        return self.files[len(self.files) // 2]

    def __call__(self) -> Tensor:
        """Decode it, uint8 ``[C, h, w]``."""
        planes = self._each(lambda image: scaled(np.asarray(image), self.window))
        return torch.from_numpy(np.stack([planes[path] for path in self.files]))

    def check(self, *, decode: bool) -> Size:
        """Look at each file for damage, and compare the sizes; a UserError has all faults."""

        def look(image: Image.Image) -> Size:
            size = (image.height, image.width)
            if decode:
                image.load()
            else:
                image.verify()
            return size

        return self._each(look)[self.own]

    def digest(self, *, content: bool = True) -> bytes:
        """Hash the files' names, the own length and, with ``content``, the own first 64 KiB."""
        names = "\n".join("/".join(path.parts[-3:]) for path in self.files)  # from the day on
        head = b""
        if content:
            with self.own.open("rb") as stream:
                head = stream.read(1 << 16)
        name = hashlib.sha256(names.encode()).digest()
        return head_digest(self.own.stat().st_size, name + head)

    def _each(self, work: Callable[[Image.Image], _T]) -> dict[Path, _T]:
        """Do something with each file; all that is wrong with them is raised together."""
        done, faults = {}, []
        for path in dict.fromkeys(self.files):
            try:
                with open_image(path) as image:
                    if image.mode not in ("L", *SIXTEEN_BIT):
                        raise ValueError(f"its pixels are {image.mode}, not grey of 16 or 8 bits")
                    height, width = image.height, image.width
                    done[path] = work(image)
            except DAMAGE as error:
                message = f"cannot read image {path}: {reason(error)}"
                faults.append(Fault(str(path), message))
                continue
            if self.size is not None and self.size != (height, width):
                wanted = f"{self.size[1]}x{self.size[0]}"
                message = f"{path} has {width}x{height} pixels, not the {wanted} of {self.own.name}"
                faults.append(Fault(str(path), message))
        refuse(faults)
        return done


def neighbours(
    numbers: Mapping[int, Sequence[Path]], number: int, own: Path, count: int
) -> tuple[tuple[Path, ...], int]:
    """List the files of a stack, that of slice ``number`` in the middle, by those of its scan.

    For a neighbour that is missing, the nearest slice on the way to it stands in; it is said for
    how many.
    """
    found, replaced = [], 0
    for step in range(-(count // 2), count // 2 + 1):
        near = step
        while near and number + near not in numbers:
            near -= 1 if step > 0 else -1
        replaced += near != step
        found.append(numbers[number + near][0] if near else own)
    return tuple(found), replaced


def stated_size(file: str) -> Size:
    """Return height and width by the name of a slice's file."""
    width, height = file.split("_")[2:4]
    return int(height), int(width)


def spacing_of(file: str) -> tuple[float, float] | None:
    """Return the millimetres from row to row and from column to column by a file's name."""
    across, down = file.removesuffix(".png").split("_")[4:6]
    found = (float(down), float(across))
    return found if min(found) > 0 else None


def scaled(values: NDArray[Any], window: tuple[float, float] | None = None) -> NDArray[np.uint8]:
    """Scale a slice from two values to 0..255, what lies outside is cut.

    Without a window from its least and largest value; a slice of a single value is 0.
    """
    low, high = window or (float(values.min()), float(values.max()))
    if not low < high:
        return np.zeros(values.shape, dtype=np.uint8)
    full = np.rint((values.astype(np.float64) - low) * (255 / (high - low)))
    return full.clip(0, 255).astype(np.uint8)


def id_and_spacing(path: Path) -> tuple[str, tuple[float, float] | None]:
    """Name a file as a table of masks does, by case, day and slice; and say how far pixels lie.

    The id of other files is their name, and their spacing is unknown.
    """
    name, parent = FILE.fullmatch(path.name), path.absolute().parent
    if name is None:
        return path.stem, None
    day = DAY.fullmatch(parent.parent.name) if parent.name == "scans" else None
    return f"{day[0]}_slice_{name[1]}" if day else path.stem, spacing_of(path.name)


def read_stack(
    path: Path, channels: int, window: tuple[float, float] | None = None
) -> NDArray[np.uint8]:
    """Decode a slice's file, with the neighbours next to it if it is one of a stack.

    Shape: uint8 ``[C, h, w]``.
    """
    name = FILE.fullmatch(path.name)
    stack = Stack((path,), None, window)
    if name is not None:
        numbers: dict[int, list[Path]] = {}
        for other in sorted(path.parent.iterdir()) if channels > 1 else ():
            if match := FILE.fullmatch(other.name):
                numbers.setdefault(int(match[1]), []).append(other)
        files, _ = neighbours(numbers, int(name[1]), path, channels)
        stack = Stack(files, stated_size(path.name), window)
    elif channels > 1:
        raise UserError(
            f"{path}: the run was trained on stacks of {channels} slices, and this name has no "
            "number by which to find its neighbours. Name it like slice_0078_266_266_1.50_1.50.png."
        )
    try:
        return stack().numpy()
    except BadSampleError as error:
        raise UserError(f"{error.faults[0].message}. Replace or remove it.") from error
