# SPDX-License-Identifier: Apache-2.0
"""Images and targets that are read together, so that what moves one moves the other.

So are images that keep their own sizes: a batch of them is a list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.batches import Made
from keymix.data.decode import Size, resized_image, to_array
from keymix.data.inputs import Inputs
from keymix.data.lazy import LazyBatches, Order
from keymix.data.sources.base import Table
from keymix.data.targets import Targets


class WholeImages(Inputs):
    """Images of which all is seen, at their own sizes or resized without a crop."""

    def __init__(
        self,
        table: Table,
        image_size: Size,
        in_chans: int,
        *,
        own_sizes: bool = False,
        listed: bool = False,
    ) -> None:
        super().__init__(table, image_size, in_chans)
        self.own_sizes, self.listed = own_sizes, listed

    def read(self, i: int) -> Tensor:
        """Decode image ``i``, and resize it unless it keeps its own size."""
        pixels = to_array(self.decoded(i))
        if self.own_sizes:
            return torch.from_numpy(pixels.copy())
        return resized_image(pixels, self.image_size)

    def server(
        self,
        targets: Targets,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> LazyBatches:
        """Make what serves them together with their targets."""
        return LazyBatches(_Maker(self, targets, augment, seed), workers, device)


@dataclass(frozen=True)
class _Maker:
    """Makes the images and targets of a batch; small enough to be sent to a worker."""

    inputs: Inputs
    targets: Targets
    augment: Augment | None
    seed: int

    def make(self, order: Order) -> Made:
        epoch, index = order
        pairs = [self._one(i, epoch) for i in index.tolist()]
        images = [image.as_subclass(Tensor) for image, _ in pairs]
        targets = self.targets.collate([target for _, target in pairs])
        pixels = images if self.inputs.listed else torch.stack(images)
        if isinstance(pixels, Tensor):
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return Made(pixels, torch.from_numpy(index), None, targets)

    def _one(self, i: int, epoch: int) -> tuple[Tensor, Tensor]:
        image, target = self.inputs.read(i), self.targets.read(i)
        if self.augment is None:
            return image, target
        return self.targets.augmented(image, target, i, self.augment, seed=self.seed, epoch=epoch)
