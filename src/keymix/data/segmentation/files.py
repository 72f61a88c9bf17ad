# SPDX-License-Identifier: Apache-2.0
"""Image files without masks, read as the data that a run was trained on reads its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keymix.data.decode import convert, open_image, reading, to_array
from keymix.data.segmentation.slices import Slice, Slices, SliceSet, spacing_of
from keymix.data.segmentation.table import REMEDY, Pixels
from keymix.data.segmentation.uwgi import DAY, FILE
from keymix.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ScanFile:
    """An image file."""

    path: Path  # the file. In ``caseN_dayN/scans/slice_….png`` its names tell its id and spacing
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
        """Millimetres from row to row and from column to column; None where no name tells them."""
        told = self.slices and FILE.fullmatch(self.path.name) is not None
        return spacing_of(self.path.name) if told else None

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
        """Make a slice of the file, and list the files beside it by number."""
        name = FILE.fullmatch(self.path.name)
        if name is None and self.channels > 1:
            raise UserError(
                f"{self.path}: the run was trained on stacks of {self.channels} slices, and this "
                "name tells no number by which to find its neighbours. Name it like "
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
