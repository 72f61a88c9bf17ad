# SPDX-License-Identifier: Apache-2.0
"""Images with masks, decoded once at the size that is wanted and held in memory."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from keymix.data.decode import Size
from keymix.data.files import in_chunks
from keymix.data.segmentation.table import Pixels, ScanTable, Seen
from keymix.data.streams import IntArray

HELD_BYTES = 1 << 30  # sets are held if all their splits together stay below this


def hold(table: ScanTable, size: Size) -> HeldScans:
    """Decode a table at a size."""
    count = len(table)
    shape = table.mask(0).shape[:-2]
    images = np.empty((count, table.channels, *size), dtype=np.uint8)
    masks = np.empty((count, *shape, *size), dtype=np.uint8)

    def decode(rows: range) -> None:
        for i in rows:
            image, mask = table.read(i, size)
            images[i], masks[i] = image.numpy(), mask.numpy()

    in_chunks(count, decode)
    return HeldScans(table, torch.from_numpy(images), torch.from_numpy(masks))


class HeldScans(ScanTable):
    """Images with masks that are held in memory at one size."""

    def __init__(self, table: ScanTable, images: Tensor, masks: Tensor) -> None:
        self.table = table
        self.images, self.masks = images, masks
        self.masks_in_memory = masks
        self.labels, self.groups, self.channels = table.labels, table.groups, table.channels
        self.stacked = table.stacked

    def image_at(self, i: int, size: Size) -> Tensor:
        """Copy image ``i``; at another size it is decoded."""
        same = self.images.shape[-2:] == size
        return self.images[i].clone() if same else self.table.image_at(i, size)

    def mask_at(self, i: int, size: Size) -> Tensor:
        """Copy the mask of image ``i``; at another size it is decoded."""
        same = self.masks.shape[-2:] == size
        return self.masks[i].clone() if same else self.table.mask_at(i, size)

    def select(self, rows: IntArray) -> HeldScans:
        """Keep some rows, still in memory."""
        return HeldScans(self.table.select(rows), self.images[rows], self.masks[rows])

    def pixels(self, i: int) -> Pixels:
        """Decode image ``i`` at its own size."""
        return self.table.pixels(i)

    def mask(self, i: int) -> Pixels:
        """Decode the mask of image ``i`` at its own size."""
        return self.table.mask(i)

    def size(self, i: int) -> Size:
        """Tell height and width of image ``i`` as it is stored."""
        return self.table.size(i)

    def spacing(self, i: int) -> tuple[float, float] | None:
        """Tell the millimetres from row to row and from column to column."""
        return self.table.spacing(i)

    def scan_id(self, i: int) -> str:
        """Name image ``i`` as predictions of it are named."""
        return self.table.scan_id(i)

    def name(self, i: int) -> str:
        """Say where image ``i`` stands."""
        return self.table.name(i)

    def numbered(self, i: int) -> str:
        """Name image ``i`` as whoever stored it may have numbered it."""
        return self.table.numbered(i)

    def open(self, i: int) -> Image.Image:
        """Open image ``i`` without decoding it."""
        return self.table.open(i)

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash image ``i`` and its mask as they are stored."""
        return self.table.digest(i, content=content)

    def inspect(self, i: int, *, decode: bool = True) -> Seen:
        """Find all that is wrong with image ``i`` and its mask."""
        return self.table.inspect(i, decode=decode)
