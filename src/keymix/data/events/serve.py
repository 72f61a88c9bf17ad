# SPDX-License-Identifier: Apache-2.0
"""Serves the frames of a split in batches, augmented as a function of (seed, epoch, index)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.decode import Size
from keymix.data.events.augment import augmented
from keymix.data.events.frame_cache import Frames
from keymix.data.events.recordings import Recordings
from keymix.data.inputs import Inputs, Made, Order, Statistics
from keymix.data.kinds import RECORDING
from keymix.data.pixels import picture_of
from keymix.data.streams import IntArray
from keymix.data.targets import Digest, Targets


class RecordedFrames(Inputs):
    """Recordings of events as frames, counts ``[T, C, H, W]``."""

    kind = RECORDING

    def __init__(self, table: Recordings, frames: Frames, image_size: Size, in_chans: int) -> None:
        super().__init__(table, image_size, in_chans)
        self.frames = frames

    def read(self, i: int) -> Tensor:
        """Copy the frames of recording ``i``."""
        return self.batch(np.array([i], dtype=np.int64))[0]

    def batch(self, index: IntArray) -> Tensor:
        """Copy the frames of some recordings, counts ``[n, T, C, H, W]``."""
        return self.frames.tensor(self.table.set_rows(index))

    def picture(self, i: int) -> Tensor:
        """Show recording ``i``: red where it became darker and blue where brighter."""
        return picture_of(self.read(i))

    @property
    def quick(self) -> bool:
        """Frames are hashed when they are made."""
        return True

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give the hash of the frames of recording ``i``."""
        del whole
        (row,) = self.table.set_rows(np.array([i], dtype=np.int64)).tolist()
        return self.frames.digests[row].encode(), False

    def update_digest(self, digest: Digest) -> str:
        """Enter the hashes of the frames."""
        for row in self.table.set_rows(np.arange(len(self), dtype=np.int64)).tolist():
            digest.update(self.frames.digests[row].encode())
        return "frames and {targets}"

    def statistics(self) -> Statistics:
        """Measure nothing: frames are counts."""
        what = "nothing: frames are counts of events and are served as they are"
        return (0.0,) * self.in_chans, (1.0,) * self.in_chans, what

    def make(self, order: Order, targets: Targets, augment: Augment | None, seed: int) -> Made:
        """Read and augment the frames of a batch; its targets are taken by position."""
        epoch, index = order
        frames = self.batch(index)
        if augment is not None:
            flip, wide = augment.flip, augment.snn_wide
            frames = augmented(frames, index, flip=flip, wide=wide, seed=seed, epoch=epoch)
        return Made(frames, torch.from_numpy(index), None)
