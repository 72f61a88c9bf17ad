# SPDX-License-Identifier: Apache-2.0
"""Batches in an order and with augmentation that depend on (seed, epoch) and nothing else."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.process
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing import connection
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from keymix.data.augment import Augment
from keymix.data.dataset import ImageData, Split
from keymix.data.pixels import Noise, Normaliser, erase, shift_and_flip
from keymix.data.rand_augment import Plan, RandAugment, plans
from keymix.data.random_parameters import crop_corners, erased_boxes, flips
from keymix.data.sample import Row
from keymix.data.shards import Shards, shares
from keymix.data.streams import IntArray, Stream, hash64
from keymix.data.transforms import batch, check_split, each_tensor
from keymix.errors import UserError

# epoch, positions in the split; of a stream, places in the order of this rank's images
Order: TypeAlias = tuple[int, IntArray | range]
Make: TypeAlias = "Callable[[Any], Made]"  # of an `Order`
_GROUP_BYTES = 4 << 20  # pixels augmented at once: few kernels for many batches, little memory


class Made(NamedTuple):
    """A batch on the device, before it is normalised."""

    # uint8 ``[B, C, H, W]``; frames ``[B, T, C, H, W]``; or a list of images
    pixels: Tensor | list[Tensor]
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    boxes: Tensor | None  # rectangles to erase, int64 ``[B, 4]``; None for none
    # the targets, where they were read with their inputs
    targets: Any = None


class Batch(NamedTuple):
    """Images ready for a model.

    Args:
        images: float32 ``[B, C, H, W]``, normalised by the training split's mean and deviation; of
            events, frames ``[B, T, C, H, W]`` of counts. A list of B images ``[C, h, w]`` where a
            task keeps images at their own sizes.
        targets: Class numbers, int64 ``[B]``; of masks, int64 ``[B, H, W]`` class numbers, or
            ``[B, K, H, W]`` of 0 and 1 where a pixel may have several; 255 is ignored. Of other
            targets, numbers ``[B, ...]``, or a list of B tensors where shapes differ; a list of B
            mappings where each has several tensors by name, which keep their types.
        index: Positions in the split, int64 ``[B]``.
    """

    images: Any  # a tensor or a list of them: which one, the task of the data says
    targets: Any
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here


class Loader:
    """Serves a split in batches, on a device; iterate it as often as wanted.

    The order is a function of (seed, epoch), an image's augmentation of (seed, epoch, index):
    neither batch size, workers, ranks nor a model's own random numbers change them. Ranks share one
    global order: batch b of all ranks together is the b-th batch of a single process whose batch
    size is ``world_size`` times as large. In training, ranks get equally many images (the order is
    repeated from its start, or cut with ``drop_last``); in evaluation no image is served twice, so
    the last batches of ranks may differ in size.

    A stream's order depends on ranks and workers too, and on the batch size: each worker reads its
    own stretch of the shards (`keymix.data.shards`), and makes its batches of that alone.

    Recordings of events come as frames ``[B, T, C, H, W]``, counts that are not normalised.

    Sets in memory live on ``device`` and are augmented there, without host work between
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
            in memory without masks, for which this is faster.
        drop_last: Drop the last batch if it is not full.
        pair_last: Where the last of several batches would have a single image, serve the first of
            the order once more next to it, as several ranks do anyway. A stream's stays as it is.
        device: Where batches come out.

    Raises:
        UserError: If a number is out of range, no batch is left, the augmentation needs a set in
            memory, or other data, or a stream to train on has fewer shards than readers.
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
        pair_last: bool = False,
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
        self.pair_last = pair_last and world_size == 1 and split.stream is None
        self.device = torch.device(device)
        self.epoch = 0
        if len(self) == 0:
            raise UserError(
                f"{batch_size=} leaves no full batch of the {len(split)} images of {split.name} on "
                f"{world_size} rank(s). Make it smaller."
            )
        self._normaliser = Normaliser(data.mean, data.std, self.device)
        self._values = None if split.values is None else split.values.to(self.device)
        self._noise = None
        if self.augment is not None:
            check_split(self.augment, split)
            if self.augment.erasing_fill == "noise":
                size = (split.in_chans, *split.image_size)
                self._noise = Noise(*size, seed, self.device)
        of = split.stream
        self._streamed = None if of is None else StreamMaker(self, of, max(1, workers))
        self._server: InMemoryBatches | WorkerBatches
        if split.images is not None and split.values is not None:
            self._server = InMemoryBatches(split.images, self.augment, seed, self.device)
        else:
            make = self._streamed or partial(_made, split, self.augment, seed)
            self._server = WorkerBatches(make, workers, self.device)
        self.workers = self._server.workers

    def __len__(self) -> int:
        count = self.share()
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
        order = self.order() if self._streamed is None else range(self.share())
        rest = order[start * self.batch_size : len(self) * self.batch_size]
        made = self._server.batches(rest, self.batch_size, epoch=self.epoch)
        return map(self._finished, made)

    def order(self) -> IntArray:
        """List this rank's positions in the split, in the order of the current epoch."""
        if self._streamed is not None:
            return self._streamed.order(self.epoch)
        positions = np.arange(len(self.split), dtype=np.int64)
        if self.train:
            keys = hash64(self.seed, self.epoch, Stream.ORDER, positions)
            positions = np.argsort(keys, kind="stable").astype(np.int64)
            share = self.share() * self.world_size
            positions = np.resize(positions, share)  # cuts, or repeats from the start
        return np.ascontiguousarray(positions[self.rank :: self.world_size])

    def share(self, rank: int | None = None) -> int:
        """Count the images per epoch of a rank, by default of this one."""
        total, ranks = len(self.split), self.world_size
        if not self.train:
            return (total - (self.rank if rank is None else rank) + ranks - 1) // ranks
        count = total // ranks if self.drop_last else math.ceil(total / ranks)
        lone = count > self.batch_size and count % self.batch_size == 1
        return count + 1 if lone and self.pair_last else count

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
        return self._normaliser(pixels) if self.split.kind.normalised else pixels.float()

    def _targets(self, made: Made) -> Any:
        """Take the targets that were read with their inputs, or those at their positions."""
        if made.targets is None and self._values is not None:
            return self._values.index_select(0, made.index)
        found = made.targets
        return [_whole(each) for each in found] if isinstance(found, list) else _whole(found)


def _whole(target: Any) -> Any:
    """Make whole numbers int64; in a mapping each has the type that it should have."""
    if isinstance(target, dict) or target.is_floating_point():
        return target
    return target.long()


def _moved(each: Tensor, device: torch.device) -> Tensor:
    """Move a tensor, without waiting for it."""
    return each.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What was drawn for an epoch, on the device; None where nothing of the kind is asked for."""

    corners: Tensor | None
    flipped: Tensor | None
    boxes: Tensor | None
    plans: list[Plan] | None


class InMemoryBatches:
    """Makes batches of a set in memory, augmented on the device that trains.

    All that chance decides about an epoch is drawn and uploaded before its first batch. After that
    no host work stands between batches but the launching of kernels: nothing is uploaded, and the
    device is never asked for a number.
    """

    workers = 0

    def __init__(
        self, images: Tensor, augment: Augment | None, seed: int, device: torch.device
    ) -> None:
        self.images = images.to(device)
        self.augment = augment
        self.seed = seed
        self.device = device
        height, width = images.shape[-2:]
        self._random = (
            RandAugment(augment.rand_augment[1], height, width, device)
            if augment is not None and augment.rand_augment[0] > 0
            else None
        )

    def batches(self, order: Any, batch_size: int, *, epoch: int) -> Iterator[Made]:
        """Serve the images of an order, augmented as the epoch wants it."""
        if len(order) == 0:
            return
        image_bytes = self.images[0].numel()
        group = batch_size * max(1, _GROUP_BYTES // (batch_size * image_bytes))
        drawn = self._draw(order, group, epoch)
        index = torch.from_numpy(order).to(self.device)
        for number, a in enumerate(range(0, len(order), group)):
            positions = index[a : a + group]
            pixels = self._augmented(self.images.index_select(0, positions), drawn, number, a)
            for b in range(0, len(positions), batch_size):
                here = slice(a + b, a + b + batch_size)
                boxes = None if drawn.boxes is None else drawn.boxes[here]
                yield Made(pixels[b : b + batch_size], index[here], boxes)

    def _draw(self, order: IntArray, group: int, epoch: int) -> _Drawn:
        augment = self.augment
        if augment is None:
            return _Drawn(None, None, None, None)
        height, width = self.images.shape[-2:]
        seed, padding, device = self.seed, augment.crop_padding, self.device
        corners = flipped = boxes = planned = None
        if padding:
            corners = torch.from_numpy(crop_corners(order, padding, seed=seed, epoch=epoch))
            corners = corners.to(device)
        if augment.flip:
            flipped = torch.from_numpy(flips(order, seed=seed, epoch=epoch)).to(device)
        if augment.erasing:
            drawn = erased_boxes(order, augment.erasing, height, width, seed=seed, epoch=epoch)
            boxes = torch.from_numpy(drawn).to(device)
        count = augment.rand_augment[0]
        if count:
            planned = plans(order, count, group, seed=seed, epoch=epoch, device=device)
        return _Drawn(corners, flipped, boxes, planned)

    def _augmented(self, pixels: Tensor, drawn: _Drawn, number: int, start: int) -> Tensor:
        if self.augment is None:
            return pixels
        here = slice(start, start + len(pixels))
        corners = None if drawn.corners is None else drawn.corners[here]
        flipped = None if drawn.flipped is None else drawn.flipped[here]
        plan = None if drawn.plans is None else drawn.plans[number]
        first, padding = self.augment.rand_augment_first, self.augment.crop_padding
        if first:
            pixels = self._randomly(pixels, plan)
        pixels = shift_and_flip(pixels, corners, flipped, padding)
        return pixels if first else self._randomly(pixels, plan)

    def _randomly(self, pixels: Tensor, plan: Plan | None) -> Tensor:
        return pixels if plan is None or self._random is None else self._random(pixels, plan)


class WorkerBatches:
    """Serves batches of inputs that are read one by one, here or ahead of use in workers.

    A batch is a function of (seed, epoch, sample index) alone, so workers change nothing but the
    time it takes.
    """

    def __init__(self, make: Make, workers: int, device: torch.device) -> None:
        self.device, self.workers, self.make = device, workers, make
        self._orders: list[Order] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._ahead = self._start(workers) if workers else None
        # In a cycle, as of an error's traceback, PyTorch's iterator is freed after its queues:
        # it cannot ask its workers to end, and waits five seconds for each.
        weakref.finalize(self, _let_go, self._ahead)

    def batches(self, order: IntArray | range, batch_size: int, *, epoch: int) -> Iterator[Made]:
        """Serve the images of an order, augmented as the epoch wants it."""
        self._orders[:] = [
            (epoch, order[a : a + batch_size]) for a in range(0, len(order), batch_size)
        ]
        made = (
            map(self.make, list(self._orders))
            if self._ahead is None
            else self._from_workers(self._ahead)
        )
        batches = map(self._moved, made)
        return batches if self.device.type == "cpu" else _one_ahead(batches)

    def _from_workers(self, ahead: DataLoader[Made | UserError]) -> Iterator[Made | UserError]:
        """Serve what workers make; a signal that ends the wait ends them too."""
        before = multiprocessing.active_children()
        made = iter(ahead)
        self._processes += [p for p in multiprocessing.active_children() if p not in before]
        try:
            yield from made
        except KeyboardInterrupt:
            for process in self._processes:
                process.terminate()
            raise
        except (ConnectionError, EOFError) as error:  # it died while its batch was opened here
            dead = connection.wait([each.sentinel for each in self._processes], timeout=5)
            for process in self._processes:
                if process.sentinel in dead:
                    process.join()  # PyTorch raises at its signal: here, not when it is freed
            raise RuntimeError("DataLoader worker ended before its batch was opened") from error

    def _moved(self, made: Made | UserError) -> Made:
        if isinstance(made, UserError):
            raise made
        move = partial(_moved, device=self.device)
        pixels = made.pixels
        return Made(
            [move(each) for each in pixels] if isinstance(pixels, list) else move(pixels),
            move(made.index),
            None if made.boxes is None else move(made.boxes),
            None if made.targets is None else each_tensor(move, made.targets),
        )

    def _start(self, workers: int) -> DataLoader[Made | UserError]:
        return DataLoader(
            _Ahead(self.make),
            sampler=self._orders,  # the batches of the current epoch
            batch_size=None,  # an item is a batch already
            collate_fn=_as_it_is,
            num_workers=workers,
            worker_init_fn=_leave_ctrl_c_to_the_parent,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # its own: the global stream belongs to the model
        )


class StreamMaker:
    """Makes batches of a stream, each a function of its number, by reading on from the last one.

    Batch b is made by reader ``b % readers`` of this rank, in whichever process.
    """

    def __init__(self, loader: Loader, stream: Shards, readers: int) -> None:
        ranks = loader.world_size
        if loader.train and len(stream.shards) < ranks * readers:
            raise UserError(
                f"{len(stream.shards)} training shards are fewer than the {ranks * readers} "
                f"readers: {ranks} devices x {readers} data workers. Ask for fewer, or write "
                "smaller shards (`keymix data shard --images-per-shard N`)."
            )
        self._split, self._stream, self._augment = loader.split, stream, loader.augment
        self._seed, self._train, self._batch_size = loader.seed, loader.train, loader.batch_size
        self._sizes = shares(loader.share(), self._batch_size, readers)
        first = sum(map(loader.share, range(loader.rank)))
        self._firsts = [first, *(first + np.cumsum(self._sizes)).tolist()]
        self._open: dict[int, tuple[tuple[int, int], Iterator[tuple[int, Row]]]] = {}
        weakref.finalize(self, self._open.clear)  # before Python takes down what reads them

    def order(self, epoch: int) -> IntArray:
        """List the positions of this rank's images in the order of an epoch."""
        of = [
            [*chain(*self._stream.blocks(*each, **self._key(epoch)))]
            for each in zip(self._firsts, self._sizes, strict=False)
        ]
        places = range(0, max(map(len, of)), self._batch_size)
        turns = [each[at : at + self._batch_size] for at in places for each in of]
        return np.array([*chain(*turns)], dtype=np.int64)

    def _key(self, epoch: int) -> dict[str, Any]:
        return {"seed": self._seed, "epoch": epoch if self._train else None}

    def __call__(self, order: Order) -> Made:
        """Read and augment the batch at some places; after the one before, without a search."""
        epoch, places = order
        turn, reader = divmod(int(places[0]) // self._batch_size, len(self._sizes))
        at = epoch, turn * self._batch_size
        before, rows = self._open.pop(reader, ((-1, 0), iter(())))
        if before != at:
            stretch = self._firsts[reader], self._sizes[reader]
            rows = self._stream.served(*stretch, skip=at[1], **self._key(epoch))
        found = dict(islice(rows, len(places)))
        if (after := at[1] + len(places)) < self._sizes[reader]:
            self._open[reader] = (epoch, after), rows
        split, index = self._split.of(found), np.array([*found], dtype=np.int64)
        made = _made(split, self._augment, self._seed, (epoch, index))
        return made._replace(targets=split.values)


def _made(split: Split, augment: Augment | None, seed: int, order: tuple[int, IntArray]) -> Made:
    """Read and augment a batch; workers with copies of a split make the same."""
    epoch, index = order
    pixels, targets = batch(split, index, augment, seed=seed, epoch=epoch)
    boxes = None
    if augment is not None and augment.erasing:
        size = split.image_size
        drawn = erased_boxes(index, augment.erasing, *size, seed=seed, epoch=epoch)
        boxes = torch.from_numpy(drawn)
    return Made(pixels, torch.from_numpy(index), boxes, targets)


def _let_go(ahead: DataLoader[Made | UserError] | None) -> None:
    """Hold what makes batches until what served them is gone."""


def _one_ahead(batches: Iterator[Made]) -> Iterator[Made]:
    """Start the transfer of the next batch before this one is used."""
    now = next(batches, None)
    while now is not None:
        after = next(batches, None)
        yield now
        now = after


class _Ahead(Dataset[Made | UserError]):
    """What a worker runs. A user's error travels as a value: its one line stays one line."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getitem__(self, order: Order) -> Made | UserError:
        try:
            return self._make(order)
        except UserError as error:
            return error


def _as_it_is(made: Any) -> Any:  # torch types this as taking a list, which it is not here
    return made


def _leave_ctrl_c_to_the_parent(worker: int) -> None:
    """Continue serving when Ctrl-C reaches all processes: the parent ends its step and saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
