# SPDX-License-Identifier: Apache-2.0
"""Images with masks in memory, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from keymix.data.segmentation.inputs import ScanImages, SplitMasks
from keymix.data.segmentation.table import Pixels, ScanTable, Seen
from PIL import Image

from keymix.data.dataset import ImageData, Split
from keymix.data.kinds import MaskKind
from keymix.data.record import DataFacts
from keymix.data.streams import IntArray
from keymix.task import get_task

EXCLUSIVE = MaskKind(multilabel=False, background=0)
MULTILABEL = MaskKind(multilabel=True, background=None)


class Scans(ScanTable):
    """Images ``[N, C, H, W]`` with masks ``[N, H, W]`` or ``[N, K, H, W]`` of the same size."""

    def __init__(self, images: Pixels, masks: Pixels, groups: Sequence[str] = ()) -> None:
        self.images, self.masks = images, masks
        self.labels = np.zeros(len(images), dtype=np.int64)
        self.groups = tuple(groups) or tuple(f"case{i}" for i in range(len(images)))
        self.channels = images.shape[1]

    def pixels(self, i: int) -> Pixels:
        return self.images[i]

    def mask(self, i: int) -> Pixels:
        return self.masks[i]

    def size(self, i: int) -> tuple[int, int]:
        return self.images.shape[-2], self.images.shape[-1]

    def scan_id(self, i: int) -> str:
        return f"scan{i}"

    def inspect(self, i: int, *, decode: bool = True) -> Seen:
        return Seen(empty=not np.isin(self.masks[i], (1, 2)).any())

    def name(self, i: int) -> str:
        return f"scans/{i}.png"

    def open(self, i: int) -> Image.Image:
        return Image.fromarray(self.images[i, 0])

    def digest(self, i: int, *, content: bool = True) -> bytes:
        return self.images[i].tobytes()

    def select(self, rows: IntArray) -> Scans:
        return Scans(self.images[rows], self.masks[rows], [self.groups[i] for i in rows.tolist()])


def scans_of(count: int, channels: int = 1, size: tuple[int, int] = (24, 20)) -> Scans:
    """Make random images with masks of three classes and some ignored pixels."""
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (count, channels, *size), dtype=np.uint8)
    masks = rng.choice(np.array([0, 1, 2, 255], dtype=np.uint8), (count, *size))
    return Scans(images, masks)


def data_of(scans: Scans, masks: MaskKind = EXCLUSIVE, *, in_memory: bool = False) -> ImageData:
    """Make a set whose three splits are the same scans, in memory as small sets are or not."""
    size = scans.size(0)
    pixels = map(torch.from_numpy, (scans.images, scans.masks)) if in_memory else (None, None)
    in_memory, drawn = pixels

    def split(name: str) -> Split:
        return Split(
            name=name,
            inputs=ScanImages(scans, size, in_memory),
            targets=SplitMasks(scans, masks, size, (), drawn),
            rows=np.arange(len(scans), dtype=np.int64),
            origin="train",
            table=scans,
        )

    options: dict[str, Any] = {
        "spec": "masks:made",
        "classes": ("background", "a", "b"),
        "image_size": size,
        "in_chans": scans.channels,
        "mean": (0.5,) * scans.channels,
        "std": (0.25,) * scans.channels,
        "facts": DataFacts(fingerprint=""),
        "task": get_task("segmentation"),
    }
    names = ("train", "val", "test")
    return ImageData(**options, **{name: split(name) for name in names})
