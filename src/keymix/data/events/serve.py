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
from keymix.errors import UserError

_OF_IMAGES = ("crop_padding", "rand_augment_first", "auto_augment", "erasing")


class LazyFrames(LazyBatches):
    """Makes batches of frames ``[B, T, C, H, W]``.

    Args:
        split: Recordings of events.
        augment: What may happen to them; None for nothing.
        seed: Seed of the augmentation.
        workers: Processes that work ahead; 0 works in this one.
        device: Where batches go, one ahead of the one in use.

    Raises:
        UserError: If the augmentation is one of images.
    """

    def __init__(
        self,
        split: Split,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> None:
        if augment is not None:
            _refuse_images(augment)
        super().__init__(_Maker(split, augment, seed), workers, device)


def _refuse_images(augment: Augment) -> None:
    told = {name: getattr(augment, name) for name in _OF_IMAGES if getattr(augment, name)}
    if augment.rand_augment[0]:
        told["rand_augment"] = augment.rand_augment
    for name, value in told.items():
        raise UserError(
            f"augment.{name}={value!r} changes images, and this data has frames of events. "
            "Leave it out; augment.flip and augment.snn_wide are for frames."
        )


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
