# SPDX-License-Identifier: Apache-2.0
"""Batches of images with masks, made one by one, here or ahead of use in workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keymix.data.augment import Augment
from keymix.data.batches import Made
from keymix.data.dataset import Split
from keymix.data.lazy import LazyBatches, Order


class LazyScans(LazyBatches):
    """Serves the images of a split with their masks.

    Args:
        split: The images; its ``scans`` have the masks.
        augment: What may happen to both; None shows them as evaluation does.
        seed: Seed of the augmentation.
        workers: Processes that work ahead; 0 works in this one.
        device: Where batches go, one ahead of the one in use.
    """

    def __init__(
        self, split: Split, augment: Augment | None, seed: int, workers: int, device: torch.device
    ) -> None:
        super().__init__(_Maker(split, augment, seed), workers, device)


@dataclass(frozen=True)
class _Maker:
    """Makes the pixels and masks of a batch; small enough to be sent to a worker."""

    split: Split
    augment: Augment | None
    seed: int

    def make(self, order: Order) -> Made:
        _, index = order
        scans, size = self.split.scans, self.split.image_size
        assert scans is not None
        images, masks = zip(*(scans.read(int(i), size) for i in index), strict=True)
        pixels = torch.stack(images).contiguous(memory_format=torch.channels_last)
        return Made(pixels, torch.from_numpy(index), None, torch.stack(masks))
