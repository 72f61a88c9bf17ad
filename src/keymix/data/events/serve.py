# SPDX-License-Identifier: Apache-2.0
"""Serves the frames of a split in batches, augmented as a function of (seed, epoch, index)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keymix.data.augment import Augment
from keymix.data.batches import Made
from keymix.data.dataset import Split
from keymix.data.events.wide import augmented
from keymix.data.lazy import LazyBatches, Order


class LazyFrames(LazyBatches):
    """Makes batches of frames ``[B, T, C, H, W]``.

    Args:
        split: Recordings of events.
        augment: What may happen to them; None for nothing.
        seed: Seed of the augmentation.
        workers: Processes that work ahead; 0 works in this one.
        device: Where batches go, one ahead of the one in use.
    """

    def __init__(
        self,
        split: Split,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> None:
        super().__init__(_Maker(split, augment, seed), workers, device)


@dataclass(frozen=True)
class _Maker:
    """Makes the frames of a batch; small enough to be sent to a worker."""

    split: Split
    augment: Augment | None
    seed: int

    def make(self, order: Order) -> Made:
        epoch, index = order
        frames = self.split.frames_of(index)
        if self.augment is not None:
            frames = augmented(
                frames,
                index,
                flip=self.augment.flip,
                wide=self.augment.snn_wide,
                seed=self.seed,
                epoch=epoch,
            )
        return Made(frames, torch.from_numpy(index), None)
