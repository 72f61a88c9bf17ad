# SPDX-License-Identifier: Apache-2.0
"""Images with masks in memory, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import tv_tensors

from keymix.data.dataset import ImageData, Split
from keymix.data.kinds import IMAGE, MASK, MaskKind
from keymix.data.mask_augment import outside
from keymix.data.record import DataFacts
from keymix.data.sample import Row
from keymix.data.view import View
from keymix.task import get_task

EXCLUSIVE = MaskKind(multilabel=False, background=0)
MULTILABEL = MaskKind(multilabel=True, background=None)


@dataclass
class Scans:
    """Images ``[N, C, H, W]`` with masks ``[N, H, W]`` or ``[N, K, H, W]`` of the same size."""

    images: NDArray[np.uint8]
    masks: NDArray[np.uint8]
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [
            Row(
                id=f"scans/{i}.png",
                name=f"scan{i}",
                group=f"case{i}",
                image=partial(_copy, image),
                target=partial(_mask, mask),
            )
            for i, (image, mask) in enumerate(zip(self.images, self.masks, strict=True))
        ]


def _copy(values: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(values.copy())


def _mask(values: NDArray[np.uint8]) -> tv_tensors.Mask:
    return tv_tensors.Mask(_copy(values))


def scans_of(count: int, channels: int = 1, size: tuple[int, int] = (24, 20)) -> Scans:
    """Make random images with masks of three classes and some ignored pixels."""
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (count, channels, *size), dtype=np.uint8)
    masks = rng.choice(np.array([0, 1, 2, 255], dtype=np.uint8), (count, *size))
    return Scans(images, masks)


def data_of(scans: Scans, masks: MaskKind = EXCLUSIVE, *, in_memory: bool = False) -> ImageData:
    """Make a set whose three splits are the same scans, in memory as small sets are or not."""
    channels, size = scans.images.shape[1], scans.images.shape[2:]
    kept = map(torch.from_numpy, (scans.images, scans.masks)) if in_memory else (None, None)
    images, drawn = kept

    def split(name: str) -> Split:
        return Split(
            name=name,
            rows=scans.rows,
            index=np.arange(len(scans.rows), dtype=np.int64),
            origin="train",
            kind=IMAGE,
            target_kind=MASK,
            view=View(mode="stretch", size=size, channels=channels),
            images=images,
            targets=drawn,
            outside=outside(masks),
        )

    options: dict[str, Any] = {
        "spec": "masks:made",
        "classes": ("background", "a", "b"),
        "image_size": size,
        "in_chans": channels,
        "mean": (0.5,) * channels,
        "std": (0.25,) * channels,
        "facts": DataFacts(fingerprint=""),
        "task": get_task("segmentation"),
    }
    return ImageData(**options, **{name: split(name) for name in ("train", "val", "test")})
