# SPDX-License-Identifier: Apache-2.0
"""Batches in an order and with augmentation that depend on (seed, epoch) and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from keymix.data.augment import Augment, check_augment
from keymix.data.batches import Batch, Made, Normaliser
from keymix.data.dataset import ImageData, Split
from keymix.data.lazy import on_device
from keymix.data.pixels import Noise, erase
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

__all__ = ["Batch", "Loader"]


class Loader:
    """Serves a split in batches, on a device; iterate it as often as wanted.

    The order is a function of (seed, epoch), an image's augmentation of (seed, epoch, index):
    neither batch size, workers, ranks nor a model's own random numbers change them. Ranks share one
    global order: batch b of all ranks together is the b-th batch of a single process whose batch
    size is ``world_size`` times as large. In training, ranks get equally many images (the order is
    repeated from its start, or cut with ``drop_last``); in evaluation no image is served twice, so
    the last batches of ranks may differ in size.

    Recordings of events come as frames ``[B, T, C, H, W]``, counts that are not normalised.

    Sets held in memory live on ``device`` and are augmented there, without host work between
    batches. Others are decoded and augmented by workers, and move while the batch before is used.

    Args:
        split: The images to serve.
        data: The data set, for the mean and deviation of its training split.
        batch_size: Images a batch and rank.
        train: Shuffle and augment.
        augment: What may happen to training images; None shows them as evaluation does.
        seed: Seed of order and augmentation.
        rank: This process's number, 0 to ``world_size - 1``.
        world_size: Number of processes that share the split.
        workers: Processes that decode and augment ahead; 0 works in this process, and so do sets
            held in memory without masks, for which this is faster.
        drop_last: Drop the last batch if it is not full.
        device: Where batches come out.

    Raises:
        UserError: If a number is out of range, no batch is left, or the augmentation needs a set
            held in memory, or other data.
    """

    def __init__(
        self,
        split: Split,
        data: ImageData,
        *,
        batch_size: int,
        train: bool,
        augment: Augment | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1:
            raise UserError(f"{batch_size=} must be at least 1.")
        if workers < 0:
            raise UserError(f"{workers=} must be 0 or more.")
        if not 0 <= rank < world_size:
            raise UserError(f"{rank=} is not in 0 … world_size - 1 ({world_size=}).")
        self.split = split
        self.batch_size = batch_size
        self.train = train
        self.augment = augment if train else None
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.device = torch.device(device)
        self.epoch = 0
        if len(self) == 0:
            raise UserError(
                f"{batch_size=} leaves no full batch of the {len(split)} images of {split.name} on "
                f"{world_size} rank(s). Make it smaller."
            )
        inputs, targets = split.inputs, split.targets
        self._normaliser = Normaliser(data.mean, data.std, self.device)
        values = targets.values
        self._values = None if values is None else values.to(self.device)
        self._noise = None
        if self.augment is not None and self.augment.erasing_fill == "noise":
            size = (split.in_chans, *split.image_size)
            self._noise = Noise(*size, seed, self.device)
        if self.augment is not None:
            check_augment(
                self.augment,
                inputs.kind,
                targets.kind,
                moves=targets.moves,
                whole=inputs.listed,
            )
        self._server = inputs.server(targets, self.augment, seed, workers, self.device)
        self.workers = self._server.workers

    def __len__(self) -> int:
        count = self._count()
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and augmentation the next iteration serves."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Serve the current epoch from batch ``start`` on, as a whole iteration would from there.

        The batches before are not made. ``start = len(self)`` serves nothing.

        Raises:
            ValueError: If there is no such batch.
            UserError: While iterating, if an image is damaged; it is named.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"{start=} is not in 0 … {len(self)}, the batches of an epoch.")
        rest = self.order()[start * self.batch_size : len(self) * self.batch_size]
        made = self._server.batches(rest, self.batch_size, epoch=self.epoch)
        return map(self._finished, made)

    def order(self) -> IntArray:
        """List this rank's positions in the split, in the order of the current epoch."""
        positions = np.arange(len(self.split), dtype=np.int64)
        if self.train:
            keys = hash64(self.seed, self.epoch, Stream.ORDER, positions)
            positions = np.argsort(keys, kind="stable").astype(np.int64)
            share = self._count() * self.world_size
            positions = np.resize(positions, share)  # cuts, or repeats from the start
        return np.ascontiguousarray(positions[self.rank :: self.world_size])

    def _count(self) -> int:
        """Count this rank's images an epoch."""
        total, ranks = len(self.split), self.world_size
        if not self.train:
            return (total - self.rank + ranks - 1) // ranks
        return total // ranks if self.drop_last else math.ceil(total / ranks)

    def _finished(self, made: Made) -> Batch:
        images: Tensor | list[Tensor]
        if isinstance(made.pixels, list):
            images = [self._normalised(each[None])[0] for each in made.pixels]
        else:
            images = self._normalised(made.pixels)
            if made.boxes is not None:
                noise = None if self._noise is None else self._noise(made.index, self.epoch)
                erase(images, made.boxes, noise)
        return Batch(images, self._targets(made), made.index)

    def _normalised(self, pixels: Tensor) -> Tensor:
        normalised = self.split.inputs.kind.normalised
        return self._normaliser(pixels) if normalised else pixels.float()

    def _targets(self, made: Made) -> Tensor | list[Tensor]:
        """Take the targets that were read with their inputs, or those at their positions."""
        if made.targets is None and self._values is not None:
            return self._values.index_select(0, made.index)
        found = made.targets
        if found is None:
            found = on_device(self.split.targets.batch(made.index.cpu().numpy()), self.device)
        return [_whole(each) for each in found] if isinstance(found, list) else _whole(found)


def _whole(target: Tensor) -> Tensor:
    """Make whole numbers int64."""
    return target if target.is_floating_point() else target.long()
