# SPDX-License-Identifier: Apache-2.0
"""What a set of images with masks is: a table opened by number, like any other, that has masks."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.decode import Size
from keymix.data.sources.base import Table

Pixels = NDArray[np.uint8]


class ScanTable(Table):
    """Images with masks, opened by number; ``labels`` are all 0.

    Args of the concrete classes are their own; every table has these.

    ``groups``: of each image the case that it is of, which no two splits may share.
    ``channels``: Channels of an image: 1, 3, or the slices of a stack.
    """

    groups: tuple[str, ...]
    channels: int

    @abstractmethod
    def pixels(self, i: int) -> Pixels:
        """Decode image ``i`` at its own size, ``[C, h, w]``.

        Raises:
            UserError: If it is damaged or missing; it is named.
        """

    @abstractmethod
    def mask(self, i: int) -> Pixels:
        """Decode the mask of image ``i`` at its own size.

        Class numbers ``[h, w]`` of exclusive masks, 0 and 1 ``[K, h, w]`` of others; 255 is
        ignored.

        Raises:
            UserError: If it is damaged, missing, of another size or has an unknown class; it is
                named.
        """

    @abstractmethod
    def size(self, i: int) -> Size:
        """Tell height and width of image ``i`` without decoding it, pixels."""

    def spacing(self, i: int) -> tuple[float, float] | None:
        """Tell the millimetres of a row and of a column of image ``i``; None where unknown."""
        del i
        return None

    @abstractmethod
    def scan_id(self, i: int) -> str:
        """Name image ``i`` as predictions of it are named: its id in a CSV, or its file's stem."""

    def read(self, i: int, size: Size) -> tuple[Tensor, Tensor]:
        """Read image ``i`` and its mask as a model of a given size sees them.

        The image is resized to height and width (bilinear, antialiased) without regard to its
        proportions, so that all of it is seen; the mask takes the nearest pixel.

        Returns:
            uint8 ``[C, H, W]``, and uint8 ``[H, W]`` or ``[K, H, W]``.
        """
        return resized(self.pixels(i), self.mask(i), size)


def resized(pixels: Pixels, mask: Pixels, size: Size) -> tuple[Tensor, Tensor]:
    """Resize an image (bilinear, antialiased) and its mask (nearest) to height and width.

    Shape: uint8 ``[C, h, w]`` and ``[h, w]`` or ``[K, h, w]`` -> the same at ``size``.
    """
    image, labels = torch.from_numpy(pixels.copy()), torch.from_numpy(mask.copy())
    if image.shape[-2:] != size:
        small = F.interpolate(
            image[None].float(), size, mode="bilinear", antialias=True, align_corners=False
        )
        image = small[0].round().clamp(0, 255).to(torch.uint8)
    if labels.shape[-2:] != size:
        planes = labels[None] if labels.ndim == 2 else labels
        planes = F.interpolate(planes[None].float(), size, mode="nearest-exact")[0]
        labels = (planes[0] if labels.ndim == 2 else planes).to(torch.uint8)
    return image, labels
