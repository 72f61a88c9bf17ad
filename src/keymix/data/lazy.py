# SPDX-License-Identifier: Apache-2.0
"""Sets read one by one: workers decode, crop and augment ahead; batches come out channels last.

A worker's batch is a function of (seed, epoch, sample index) alone, so workers change nothing but
the time it takes.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.process
import signal
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from keymix.data.augment import Augment
from keymix.data.auto_augment import AutoAugment
from keymix.data.batches import Made
from keymix.data.decode import convert, evaluation_array, reading, resize, to_array
from keymix.data.draws import erased_boxes, flips, resized_crop
from keymix.data.inputs import Inputs
from keymix.data.measure import REMEDY
from keymix.data.rand_augment import RandAugment, plans
from keymix.data.streams import IntArray
from keymix.data.targets import Targets
from keymix.errors import UserError

Order: TypeAlias = tuple[int, IntArray]  # epoch, positions in the split
_CPU = torch.device("cpu")
_SIDE = 64  # pixels a side from which a JPEG file may be decoded smaller


@runtime_checkable
class Maker(Protocol):
    """Makes a batch; small enough to be sent to a worker."""

    def make(self, order: Order) -> Made:
        """Make the batch of an epoch's positions in the split."""
        ...


class LazyBatches:
    """Serves batches that a maker makes one by one, here or ahead of use in workers."""

    def __init__(self, maker: Maker, workers: int, device: torch.device) -> None:
        self.device, self.workers = device, workers
        self._maker = maker
        self._orders: list[Order] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._ahead = self._start(workers) if workers else None
        # In a cycle, as of an error's traceback, PyTorch's iterator is freed after its queues:
        # it cannot ask its workers to end, and waits five seconds for each.
        weakref.finalize(self, _let_go, self._ahead)

    def batches(self, order: IntArray, batch_size: int, *, epoch: int) -> Iterator[Made]:
        """Serve the images of an order, augmented as the epoch wants it."""
        self._orders[:] = [
            (epoch, order[a : a + batch_size]) for a in range(0, len(order), batch_size)
        ]
        made = (
            map(self._maker.make, list(self._orders))
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

    def _moved(self, made: Made | UserError) -> Made:
        if isinstance(made, UserError):
            raise made
        return Made(
            on_device(made.pixels, self.device),
            made.index.to(self.device, non_blocking=True),
            None if made.boxes is None else made.boxes.to(self.device, non_blocking=True),
            None if made.targets is None else on_device(made.targets, self.device),
        )

    def _start(self, workers: int) -> DataLoader[Made | UserError]:
        return DataLoader(
            _Ahead(self._maker),
            sampler=_Orders(self._orders),
            batch_size=None,  # an item is a batch already
            collate_fn=_as_it_is,
            num_workers=workers,
            worker_init_fn=_leave_ctrl_c_to_the_parent,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # its own: the global stream belongs to the model
        )


def on_device(batch: Tensor | list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """Move a batch, without waiting for it."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return [each.to(device, non_blocking=True) for each in batch]


class ImagesOneByOne(Inputs):
    """Images that are decoded when they are needed."""

    def read(self, i: int) -> Tensor:
        """Decode image ``i`` through the evaluation transform."""
        with reading(self.table.name(i), REMEDY), self.table.open(i) as image:
            pixels = evaluation_array(image, self.image_size, self.in_chans, self.crop_pct)
        return torch.from_numpy(pixels.copy())

    @property
    def drafted(self) -> bool:
        """A JPEG file is decoded smaller at first, which is quicker."""
        return True

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give size and pixels of image ``i`` before it is resized; of a draft unless whole."""
        with self.table.open(i) as opened:
            size = opened.size
            if not whole:
                opened.draft(None, (_SIDE, _SIDE))
            decoded = convert(opened, self.in_chans)
        return f"{size}".encode() + decoded.tobytes(), False

    def server(
        self,
        targets: Targets,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> LazyImages:
        """Make what serves them."""
        del targets
        return LazyImages(self, augment, seed, workers, device)


class LazyImages(LazyBatches):
    """Makes batches of a set that is read one by one."""

    def __init__(
        self,
        inputs: Inputs,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> None:
        if augment is not None and augment.rand_augment[0] and augment.rand_augment_first:
            raise UserError(
                "augment.rand_augment_first=True needs images that are held in memory (96 pixels "
                "a side or less); this set is read one by one and cropped first. Leave it out."
            )
        if augment is not None and augment.auto_augment:
            _auto_augment(
                augment.auto_augment, inputs.in_chans, *inputs.image_size
            )  # or refuse now
        super().__init__(_Maker(inputs, augment, seed), workers, device)


def _let_go(ahead: DataLoader[Made | UserError] | None) -> None:
    """Hold what makes batches until what served them is gone."""


def _one_ahead(batches: Iterator[Made]) -> Iterator[Made]:
    """Start the transfer of the next batch before this one is used."""
    now = next(batches, None)
    while now is not None:
        after = next(batches, None)
        yield now
        now = after


@dataclass(frozen=True)
class _Maker:
    """Makes the pixels of a batch; small enough to be sent to a worker."""

    inputs: Inputs
    augment: Augment | None
    seed: int

    def make(self, order: Order) -> Made:
        epoch, index = order
        pixels, boxes = self._pixels(index, epoch)
        return Made(
            pixels.contiguous(memory_format=torch.channels_last), torch.from_numpy(index), boxes
        )

    def _pixels(self, index: IntArray, epoch: int) -> tuple[Tensor, Tensor | None]:
        augment, seed = self.augment, self.seed
        if augment is None:
            return self.inputs.batch(index), None
        pixels = self._cropped(index, augment.random_resized_crop, epoch)
        if augment.flip:
            flipped = flips(index, seed=seed, epoch=epoch)
            pixels[flipped] = pixels[flipped][..., ::-1]
        if augment.auto_augment:
            change = _auto_augment(augment.auto_augment, *pixels.shape[1:])
            pixels = change(pixels, index, seed=seed, epoch=epoch)
        images = torch.from_numpy(pixels)
        count, bin_ = augment.rand_augment
        height, width = self.inputs.image_size
        if count:
            (plan,) = plans(index, count, len(index), seed=seed, epoch=epoch, device=_CPU)
            images = _rand_augment(bin_, height, width)(images, plan)
        if not augment.erasing:
            return images, None
        boxes = erased_boxes(index, augment.erasing, height, width, seed=seed, epoch=epoch)
        return images, torch.from_numpy(boxes)

    def _cropped(
        self, index: IntArray, area: tuple[float, float], epoch: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Cut a box out of each image and resize it."""
        inputs = self.inputs
        pixels = np.empty((len(index), inputs.in_chans, *inputs.image_size), dtype=np.uint8)
        shape = inputs.image_size[1] / inputs.image_size[0]
        for k, i in enumerate(index.tolist()):
            image = inputs.decoded(i)
            top, left, h, w = resized_crop(
                i, image.height, image.width, area, shape=shape, seed=self.seed, epoch=epoch
            )
            pixels[k] = to_array(resize(image, inputs.image_size, (left, top, left + w, top + h)))
        return pixels


@functools.lru_cache(maxsize=4)
def _rand_augment(bin_: int, height: int, width: int) -> RandAugment:
    """Make the operations once a process."""
    return RandAugment(bin_, height, width, _CPU)


@functools.lru_cache(maxsize=4)
def _auto_augment(config: str, channels: int, height: int, width: int) -> AutoAugment:
    """Make timm's operations once a process."""
    return AutoAugment(config, channels, height, width)


class _Ahead(Dataset[Made | UserError]):
    """What a worker runs. A user's error travels as a value: its one line stays one line."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker

    def __getitem__(self, order: Order) -> Made | UserError:
        try:
            return self._maker.make(order)
        except UserError as error:
            return error


class _Orders(Sampler[Order]):
    """The batches of the current epoch, as the workers' orders."""

    def __init__(self, orders: list[Order]) -> None:
        self._orders = orders

    def __iter__(self) -> Iterator[Order]:
        return iter(list(self._orders))

    def __len__(self) -> int:
        return len(self._orders)


def _as_it_is(made: Any) -> Any:  # torch types this as taking a list, which it is not here
    return made


def _leave_ctrl_c_to_the_parent(worker: int) -> None:
    """Go on serving when Ctrl-C reaches all processes: the parent ends its step and saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
