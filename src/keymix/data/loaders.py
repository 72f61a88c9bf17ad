# SPDX-License-Identifier: Apache-2.0
"""Batches in an order and with augmentation that depend on (seed, epoch) and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from keymix.data.augment import Augment
from keymix.data.batches import erase, evaluation_batch, training_batch
from keymix.data.dataset import ImageData, Split
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

_Order: TypeAlias = tuple[int, IntArray]  # epoch, positions in the split
_Made: TypeAlias = tuple[int, IntArray, Tensor | UserError]


class Batch(NamedTuple):
    """Images ready for a model.

    Args:
        images: float32 ``[B, C, H, W]``, normalised by the training split's mean and deviation.
        targets: Class numbers, int64 ``[B]``.
        index: Positions in the split, int64 ``[B]``.
    """

    images: Tensor
    targets: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here


class Loader:
    """Serves a split in batches; iterate it as often as wanted.

    The order is a function of (seed, epoch), an image's augmentation of (seed, epoch, index):
    neither batch size, workers, ranks nor a model's own random numbers change them. Ranks share one
    global order: batch b of all ranks together is the b-th batch of a single process whose batch
    size is ``world_size`` times as large. In training, ranks get equally many images (the order is
    repeated from its start, or cut with ``drop_last``); in evaluation no image is served twice, so
    the last batches of ranks may differ in size.

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
            held in memory without RandAugment, for which this is faster.
        drop_last: Drop the last batch if it is not full.

    Raises:
        UserError: If a number is out of range, or no batch is left.
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
        self.epoch = 0
        if len(self) == 0:
            raise UserError(
                f"{batch_size=} leaves no full batch of the {len(split)} images of {split.name} on "
                f"{world_size} rank(s). Make it smaller."
            )
        # (x / 255 - mean) / std as one multiplication and one addition
        mean = torch.tensor(data.mean, dtype=torch.float64).view(1, -1, 1, 1)
        std = torch.tensor(data.std, dtype=torch.float64).view(1, -1, 1, 1)
        self._scale = (1 / (255 * std)).float()
        self._shift = (-mean / std).float()
        in_process = split.images is not None and (
            self.augment is None or self.augment.rand_augment[0] == 0
        )
        self.workers = 0 if in_process else workers
        self._maker = _Maker(split, self.augment, seed)
        self._ahead = self._start_workers() if self.workers else None

    def __len__(self) -> int:
        count = self._count()
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and augmentation the next iteration serves."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        made = self._ahead if self._ahead is not None else map(self._maker.make, self._orders())
        for epoch, index, pixels in made:
            if isinstance(pixels, UserError):
                raise pixels
            yield self._finished(epoch, index, pixels)

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

    def _orders(self) -> Iterator[_Order]:
        epoch, order = self.epoch, self.order()
        for b in range(len(self)):
            yield epoch, order[b * self.batch_size : (b + 1) * self.batch_size]

    def _finished(self, epoch: int, index: IntArray, pixels: Tensor) -> Batch:
        images = pixels.to(torch.float32).mul_(self._scale).add_(self._shift)
        if self.augment is not None:
            erase(images, self.augment.erasing, index, seed=self.seed, epoch=epoch)
        positions = torch.from_numpy(index)
        return Batch(images, self.split.labels.index_select(0, positions), positions)

    def _start_workers(self) -> DataLoader[_Made]:
        return DataLoader(
            _Ahead(self._maker),
            sampler=_Orders(self),
            batch_size=None,  # an item is a batch already
            collate_fn=_as_it_is,
            num_workers=self.workers,
            persistent_workers=True,
            generator=torch.Generator(),  # its own: the global stream belongs to the model
        )


@dataclass(frozen=True)
class _Maker:
    """Makes the pixels of a batch; small enough to be sent to a worker."""

    split: Split
    augment: Augment | None
    seed: int

    def make(self, order: _Order) -> _Made:
        epoch, index = order
        if self.augment is None:
            return epoch, index, evaluation_batch(self.split, index)
        pixels = training_batch(self.split, index, self.augment, seed=self.seed, epoch=epoch)
        return epoch, index, pixels


class _Ahead(Dataset[_Made]):
    """What a worker runs. A user's error travels as a value: its one line stays one line."""

    def __init__(self, maker: _Maker) -> None:
        self._maker = maker

    def __getitem__(self, order: _Order) -> _Made:
        try:
            return self._maker.make(order)
        except UserError as error:
            return *order, error


class _Orders(Sampler[_Order]):
    """The batches of the loader's current epoch, as the workers' orders."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[_Order]:
        return self._loader._orders()

    def __len__(self) -> int:
        return len(self._loader)


def _as_it_is(made: Any) -> Any:  # torch types this as taking a list, which it is not here
    return made
