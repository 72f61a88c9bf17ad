# SPDX-License-Identifier: Apache-2.0
"""A table whose images are pixels already: nothing is decoded."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.sources.base import Table, check_count
from keymix.data.streams import IntArray
from keymix.data.targets import ClassTargets, Targets


class Arrays(Table):
    """Images as one array."""

    held: NDArray[np.uint8]

    def __init__(
        self,
        what: str,
        pixels: NDArray[np.uint8],
        targets: IntArray | Targets,
        rows: IntArray | None = None,
    ) -> None:
        self._targets = ClassTargets(targets) if isinstance(targets, np.ndarray) else targets
        self.labels = self._targets.strata
        self.held = pixels
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
        pixels = self.held[i]
        return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash the pixels of image ``i``; they are in memory, whatever ``content`` says."""
        return hashlib.sha256(self.held[i].tobytes()).digest()

    def select(self, rows: IntArray) -> Table:
        """Copy the pixels of ``rows``."""
        return Arrays(self._what, self.held[rows], self._targets.select(rows), self._rows[rows])
