# SPDX-License-Identifier: Apache-2.0
"""TIFF files of several pages: a page is a slice, as it is stored, and nobody knows how it lies.

Millimetres are read where their unit is certain: as ImageJ writes them, or pixels per centimetre.
A resolution per inch is a printer's, and mostly a default.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.decode import DAMAGE, SIXTEEN_BIT, open_image, reason
from keymix.data.formats.base import Volume, bad, fitting

_ABOUT, _X, _Y, _UNIT = 270, 282, 283, 296  # tags: description, pixels per unit, unit
_MODES = ("1", "L", "P", "F", *SIXTEEN_BIT)
_UNITS = {"mm": 1.0, "cm": 10.0, "um": 1e-3, "µm": 1e-3, r"\u00B5m": 1e-3, "micron": 1e-3}
_DAMAGE = (*DAMAGE, TypeError)  # of pages after the first
_AS_STORED = ((0, -1), (1, -1), (2, 1))  # columns to the left, rows to the back


class TiffVolume(Volume):
    """A TIFF file; pages of several sizes, or colours, are refused."""

    suffix = ".tif"

    def __init__(self, path: Path) -> None:
        found = []
        try:
            with open_image(path) as image:
                tags: Any = getattr(image, "tag_v2", {})
                for at in range(getattr(image, "n_frames", 1)):
                    image.seek(at)
                    found.append((*image.size, image.mode))
        except _DAMAGE as error:
            raise bad(path, reason(error)) from error
        if len({*found}) > 1 or image.mode not in _MODES:
            kinds = ", ".join(f"{w}x{h} {mode}" for w, h, mode in sorted({*found}))
            raise bad(path, f"its pages are {kinds}: they must be grey, and of one size")
        super().__init__([path], (*image.size, len(found)), _AS_STORED, None)
        about = dict(re.findall(r"^(\w+)=(\S*)", str(tags.get(_ABOUT, "")), re.MULTILINE))
        axes = [name for name in ("channels", "slices", "frames") if int(about.get(name, 1)) > 1]
        if len(axes) > 1 or "channels" in axes:
            raise bad(path, f"its pages are {' and '.join(axes)}: they must be slices alone")
        unit = _UNITS.get(about.get("unit", "")) if "ImageJ" in about else None
        unit = 10.0 if unit is None and tags.get(_UNIT) == 3 else unit
        x, y = (float(tags.get(tag, 0)) for tag in (_X, _Y))
        self.tags: dict[int, Any] = {}
        if unit and x > 0 and y > 0:
            self.voxel = (unit / y, unit / x, unit * float(about.get("spacing", 0)))
            self.tags = {tag: tags[tag] for tag in (_X, _Y, _UNIT) if tag in tags}
        if self.tags and "ImageJ" in about:
            known = {"ImageJ": "1.54", "slices": self.depth} | {
                name: about[name] for name in ("unit", "spacing") if name in about
            }
            self.tags[_ABOUT] = "".join(f"{name}={value}\n" for name, value in known.items())

    def across(self, axis: int, at: int) -> NDArray[Any]:
        """Read a page, columns first."""
        del axis
        try:
            with open_image(self.stored[0]) as image:
                image.seek(at)
                pixels = np.asarray(image)
                return (pixels.astype(np.uint8) if pixels.dtype == bool else pixels).T
        except _DAMAGE as error:
            raise bad(self.stored[0], f"page {at + 1}: {reason(error)}") from error

    def files(self, values: NDArray[Any]) -> dict[str, bytes]:
        """Make a file of as many pages with its resolution."""
        pages = np.ascontiguousarray(fitting(values, np.uint8, np.uint16, np.int32).T)
        first, *rest = map(Image.fromarray, pages)
        stream, kind = io.BytesIO(), "tiff_deflate"
        first.save(
            stream, "TIFF", save_all=True, append_images=rest, tiffinfo=self.tags, compression=kind
        )
        return {self.suffix: stream.getvalue()}
