# SPDX-License-Identifier: Apache-2.0
"""Images with masks as the inputs and targets of a split."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.decode import Size
from keymix.data.inputs import WholeImages
from keymix.data.kinds import IMAGE, SLICES, MaskKind
from keymix.data.segmentation.augment import augmented, outside
from keymix.data.segmentation.held import HeldScans
from keymix.data.segmentation.table import MaskTargets, ScanTable, Unlisted
from keymix.data.streams import IntArray


class ScanImages(WholeImages):
    """Images with masks, resized without regard to their proportions, so that all is seen."""

    def __init__(self, table: ScanTable, image_size: Size) -> None:
        super().__init__(table, image_size, table.channels)
        self.scans = table
        self.kind = SLICES if table.stacked else IMAGE
        self.images = table.images if isinstance(table, HeldScans) else None

    def read(self, i: int) -> Tensor:
        """Read image ``i`` and resize it."""
        return self.scans.image_at(i, self.image_size)

    def picture(self, i: int) -> Tensor:
        """Read image ``i``; of a stack, the slice in the middle."""
        image = self.read(i)
        return image[self.in_chans // 2][None] if self.scans.stacked else image

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give the pixels of image ``i``; of a stack, of the slice in the middle."""
        del whole
        image = self.picture(i).numpy()
        return image.tobytes(), bool(image.min() == image.max())


class SplitMasks(MaskTargets):
    """The masks of a split, at the size of its images."""

    moves = True

    def __init__(
        self,
        table: ScanTable,
        masks: MaskKind,
        image_size: Size,
        unlisted: Sequence[Unlisted] = (),
    ) -> None:
        super().__init__(table)
        self.masks, self.image_size, self.unlisted = masks, image_size, tuple(unlisted)

    def read(self, i: int) -> Tensor:
        """Read the mask of image ``i`` at the size of the images, uint8."""
        return self.table.mask_at(i, self.image_size)

    def select(self, rows: IntArray) -> SplitMasks:
        """Keep the masks of ``rows``."""
        return SplitMasks(self.table.select(rows), self.masks, self.image_size, self.unlisted)

    def augmented(
        self, image: Tensor, target: Tensor, i: int, augment: Augment, *, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Augment an image and its mask together."""
        fill = outside(self.masks)
        return augmented(image, target, i, augment, fill=fill, seed=seed, epoch=epoch)
