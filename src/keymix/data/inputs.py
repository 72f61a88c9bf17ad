# SPDX-License-Identifier: Apache-2.0
"""The inputs of a split, by position: how each is read, pictured, hashed and made into batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.batches import Made
from keymix.data.decode import Size, convert, reading
from keymix.data.kinds import IMAGE, InputKind
from keymix.data.measure import REMEDY, in_chunks, is_large, mean_std, sample
from keymix.data.sources.base import Table
from keymix.data.streams import IntArray
from keymix.data.targets import Digest, Targets

Statistics = tuple[tuple[float, ...], tuple[float, ...], str]
"""Mean and deviation of each channel, and in words of which inputs they are."""
HASHED = (
    "pixels and {targets}",
    "length and first 64 KiB of the encoded images, and {targets}",
    "name and length of all image files, 64 KiB of a fixed sample of 2,000 a split, {targets}",
)
"""What of images enters the fingerprint of a set, from the strictest to the loosest."""


class Server(Protocol):
    """Makes batches of a split."""

    workers: int

    def batches(self, order: IntArray, batch_size: int, *, epoch: int) -> Iterator[Made]:
        """Serve the inputs of an order, augmented as the epoch wants it."""
        ...


class Inputs(ABC):
    """The inputs of a split, by position."""

    kind: InputKind = IMAGE
    listed: bool = False
    """Whether a batch is a list of images, each of its own size."""
    images: Tensor | None = None
    """All pixels, uint8 ``[N, C, H, W]``, where they are in memory."""

    def __init__(
        self, table: Table, image_size: Size, in_chans: int, crop_pct: float = 1.0
    ) -> None:
        self.table = table
        self.image_size, self.in_chans, self.crop_pct = image_size, in_chans, crop_pct

    def __len__(self) -> int:
        return len(self.table)

    @abstractmethod
    def read(self, i: int) -> Tensor:
        """Read input ``i`` as evaluation sees it, uint8 ``[C, H, W]``."""

    @abstractmethod
    def server(
        self,
        targets: Targets,
        augment: Augment | None,
        seed: int,
        workers: int,
        device: torch.device,
    ) -> Server:
        """Make what serves them in batches."""

    def batch(self, index: IntArray) -> Tensor:
        """Read the inputs at some positions."""
        return torch.stack([self.read(i) for i in index.tolist()])

    def picture(self, i: int) -> Tensor:
        """Read input ``i`` for a person to look at, uint8 ``[C, H, W]``."""
        return self.read(i)

    def decoded(self, i: int) -> Image.Image:
        """Decode image ``i`` at its own size, for transforms that crop before they resize."""
        with reading(self.table.name(i), REMEDY), self.table.open(i) as image:
            return convert(image, self.in_chans)

    @property
    def quick(self) -> bool:
        """Whether all can be looked at in no time."""
        return self.images is not None

    @property
    def drafted(self) -> bool:
        """Whether a first look is at fewer pixels, so that equal inputs need a second one."""
        return False

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give bytes that tell input ``i`` from others, and say whether it is of one colour."""
        del whole
        found = self.read(i)
        return f"{tuple(found.shape)}".encode() + found.numpy().tobytes(), False

    def update_digest(self, digest: Digest) -> str:
        """Enter the inputs into the fingerprint of the data, and say what of them is hashed."""
        if self.images is not None:
            digest.update(f"{tuple(self.images.shape)}\n".encode())
            digest.update(self.images.numpy().data)
            return HASHED[0]
        count = len(self)
        large = is_large(count)
        read: Container[int] = frozenset(sample(count).tolist()) if large else range(count)

        def digests(rows: range) -> bytes:
            return b"".join(self.table.digest(i, content=i in read) for i in rows)

        for some in in_chunks(count, digests):
            digest.update(some)
        return HASHED[2 if large else 1]

    def statistics(self) -> Statistics:
        """Measure mean and deviation of each channel, of values 0..1."""
        if self.images is not None:
            return *mean_std([self.images.numpy()]), f"all training {self.kind.nouns}"
        rows = sample(len(self))
        mean, std = mean_std([self.read(int(i)).numpy()[None] for i in rows])
        few = f"a fixed sample of {len(rows)}" if len(rows) < len(self) else "all"
        return mean, std, f"{few} training {self.kind.nouns}"
