# SPDX-License-Identifier: Apache-2.0
"""Sets held in memory: one tensor on the device that trains, augmented there in batch.

All that chance decides about an epoch is drawn and uploaded before its first batch. After that no
host work stands between batches but the launching of kernels: nothing is uploaded, and the device
is never asked for a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.batches import Made
from keymix.data.decode import Size
from keymix.data.draws import crop_corners, erased_boxes, flips
from keymix.data.inputs import Inputs
from keymix.data.pixels import shift_and_flip
from keymix.data.rand_augment import Plan, RandAugment, plans
from keymix.data.sources.base import Table
from keymix.data.streams import IntArray
from keymix.data.targets import Targets
from keymix.errors import UserError

_GROUP_BYTES = 4 << 20  # pixels augmented at once: few kernels for many batches, little memory


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What was drawn for an epoch, on the device; None where nothing of the kind is asked for."""

    corners: Tensor | None
    flipped: Tensor | None
    boxes: Tensor | None
    plans: list[Plan] | None


class ImagesInMemory(Inputs):
    """Images that are decoded in memory at one size."""

    def __init__(self, table: Table, images: Tensor, crop_pct: float = 1.0) -> None:
        size: Size = (images.shape[-2], images.shape[-1])
        super().__init__(table, size, images.shape[1], crop_pct)
        self.images: Tensor = images

    def read(self, i: int) -> Tensor:
        """Copy image ``i``."""
        return self.images[i].clone()

    def server(
        self,
        targets: Targets,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> HeldImages:
        """Make what serves them, in this process: the device does the work."""
        del targets, workers
        return HeldImages(self.images, augment, seed, device)


class HeldImages:
    """Makes batches of a set held in memory."""

    workers = 0

    def __init__(
        self, images: Tensor, augment: Augment | None, seed: int, device: torch.device
    ) -> None:
        if augment is not None and augment.auto_augment:
            raise UserError(
                f"augment.auto_augment={augment.auto_augment!r} changes images one by one, and at "
                f"{images.shape[-2]}x{images.shape[-1]} pixels (data.image_size) this set is held "
                "in memory. Use augment.rand_augment, operations and magnitude such as 2,9."
            )
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

    def batches(self, order: IntArray, batch_size: int, *, epoch: int) -> Iterator[Made]:
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
