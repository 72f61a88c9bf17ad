# SPDX-License-Identifier: Apache-2.0
"""Batches of images with masks, made one by one, here or ahead of use in workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.batches import Made
from keymix.data.dataset import Split
from keymix.data.lazy import LazyBatches, Order
from keymix.data.segmentation.augment import augmented, outside
from keymix.data.tasks import MaskKind


class LazyScans(LazyBatches):
    """Serves the images of a split with their masks.

    Args:
        split: The images; its ``scans`` have the masks.
        masks: What the masks are.
        augment: What may happen to both; None shows them as evaluation does.
        seed: Seed of the augmentation.
        workers: Processes that work ahead; 0 works in this one.
        device: Where batches go, one ahead of the one in use.
    """

    def __init__(
        self,
        split: Split,
        masks: MaskKind,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> None:
        super().__init__(_Maker(split, outside(masks), augment, seed), workers, device)


@dataclass(frozen=True)
class _Maker:
    """Makes the pixels and masks of a batch; small enough to be sent to a worker."""

    split: Split
    fill: int
    augment: Augment | None
    seed: int

    def make(self, order: Order) -> Made:
        epoch, index = order
        images, masks = zip(*(self._one(i, epoch) for i in index.tolist()), strict=True)
        pixels = torch.stack(images).contiguous(memory_format=torch.channels_last)
        return Made(pixels, torch.from_numpy(index), None, torch.stack(masks))

    def _one(self, i: int, epoch: int) -> tuple[Tensor, Tensor]:
        scans = self.split.scans
        assert scans is not None
        image, mask = scans.read(i, self.split.image_size)
        if self.augment is None:
            return image, mask
        return augmented(image, mask, i, self.augment, fill=self.fill, seed=self.seed, epoch=epoch)
