# SPDX-License-Identifier: Apache-2.0
"""RandAugment for whole batches: the images that draw the same operation are changed together.

Operations, magnitudes and pixels are torchvision's (`torchvision.transforms.v2.RandAugment`, its 31
bins, nearest neighbour, black outside). What is drawn is known on the host before the epoch begins,
so images are sorted by operation there and the device is never asked anything. The magnitude is
fixed, so a shear, shift or rotation is a fixed map from pixels to pixels: torchvision moves an
image of numbered pixels once, and every batch is gathered through that map.

`AutoAugment` is timm's RandAugment for one image at a time. timm draws from Python's and NumPy's
global generators: they are seeded for each image and get their own state back, so that an image is
augmented alike whatever came before it.

Paper: RandAugment, https://arxiv.org/abs/1909.13719.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from keymix.data.pixels import take
from keymix.data.random_parameters import operations
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

# torchvision's order; a number in a draw is a place in this list.
NAMES = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
GEOMETRIC = NAMES[1:6]
_SIGNS = (False, True)
_BINS = 31
_CODES = 2 * len(NAMES)  # 2 * operation + negative
_FIRST, _LAST = 2 * 1, 2 * 6  # codes of the geometric operations: [_FIRST, _LAST)


@dataclass(frozen=True, eq=False)
class Plan:
    """What happens to the images of one batch, ready on the device."""

    # for each operation the order that sorts the images by code, given the order before; at last
    # the order that puts them back. int64 ``[operations + 1, n]``
    orders: Tensor
    codes: Tensor  # sorted codes, int64 ``[operations, n]``
    # how many images have each code; the host's own copy, ``[operations][28]``
    counts: tuple[tuple[int, ...], ...]


def plans(
    index: IntArray, count: int, size: int, *, seed: int, epoch: int, device: torch.device
) -> list[Plan]:
    """Draw operations for images and sort each batch of them; one upload for all."""
    return sort_by_operation(
        operations(index, count, seed=seed, epoch=epoch), size=size, device=device
    )


def sort_by_operation(codes: IntArray, *, size: int, device: torch.device) -> list[Plan]:
    """Plan batches of ``size`` images with given codes, int64 ``[n, operations]``."""
    starts = range(0, len(codes), size)
    parts = [_sorted(codes[a : a + size]) for a in starts]
    orders, kept = (
        torch.from_numpy(np.concatenate([part[i] for part in parts], axis=1)).to(device)
        for i in (0, 1)
    )
    return [
        Plan(orders[:, a : a + size], kept[:, a : a + size], part[2])
        for a, part in zip(starts, parts, strict=True)
    ]


def _sorted(codes: IntArray) -> tuple[IntArray, IntArray, tuple[tuple[int, ...], ...]]:
    n, count = codes.shape
    orders = np.empty((count + 1, n), dtype=np.int64)
    kept = np.empty((count, n), dtype=np.int64)
    now = np.arange(n)  # which image stands where
    for step in range(count):
        orders[step] = np.argsort(codes[now, step], kind="stable")
        now = now[orders[step]]
        kept[step] = codes[now, step]
    orders[count] = np.argsort(now, kind="stable")
    return orders, kept, tuple(tuple(np.bincount(k, minlength=_CODES).tolist()) for k in kept)


class RandAugment:
    """The operations at one magnitude, for images of one size."""

    def __init__(self, bin_: int, height: int, width: int, device: torch.device) -> None:
        self._sizes = [
            magnitude(NAMES[code // 2], bin_, negative=code % 2 == 1) for code in range(_CODES)
        ]
        self._maps = source_maps(bin_, height, width).to(device)

    def __call__(self, pixels: Tensor, plan: Plan) -> Tensor:
        """Change uint8 ``[B, C, H, W]`` as planned; the input stays as it is."""
        for order, codes, counts in zip(plan.orders, plan.codes, plan.counts, strict=False):
            pixels = self._step(pixels.index_select(0, order), codes, counts)
        return pixels.index_select(0, plan.orders[-1])

    def _step(self, pixels: Tensor, codes: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Apply one operation to each image of a sorted batch, in place."""
        ends = np.cumsum(counts).tolist()
        a, b = ends[_FIRST - 1], ends[_LAST - 1]
        if a < b:
            maps = self._maps.index_select(0, codes[a:b] - _FIRST)
            pixels[a:b] = take(pixels[a:b], maps)
        for code in range(_LAST, _CODES):
            a, b = ends[code - 1], ends[code]
            if a < b:
                pixels[a:b] = recolour(NAMES[code // 2], pixels[a:b], self._sizes[code])
        return pixels


def magnitude(name: str, bin_: int, *, negative: bool = False, side: int = 1) -> float:
    """Return torchvision's magnitude: slope, share, degrees, bits, or pixels of ``side``."""
    if name in ("Identity", "AutoContrast", "Equalize"):
        return 0.0
    if name == "Posterize":
        return float((8 - torch.arange(_BINS) / ((_BINS - 1) / 4)).round()[bin_])
    if name == "Solarize":
        return float(torch.linspace(1.0, 0.0, _BINS)[bin_])
    last = {"Rotate": 30.0, "ShearX": 0.3, "ShearY": 0.3}.get(name, 0.9)
    if name.startswith("Translate"):
        last = 150.0 / 331.0 * side
    size = float(torch.linspace(0.0, last, _BINS)[bin_])
    return -size if negative else size


@functools.lru_cache(maxsize=16)
def source_maps(bin_: int, height: int, width: int) -> Tensor:
    """Make the source maps of the geometric operations, positive and negative in turn.

    Shape: int64 ``[10, height * width]``, as `keymix.data.pixels.take` reads them.
    """
    numbered = torch.arange(1.0, height * width + 1).view(1, height, width)
    moved = [_moved(name, numbered, bin_, negative) for name in GEOMETRIC for negative in _SIGNS]
    return torch.stack(moved).flatten(1).long() - 1  # black, which is 0, becomes -1


def _moved(name: str, image: Tensor, bin_: int, negative: bool) -> Tensor:
    axis = 1 if name.endswith("Y") else 0
    size = magnitude(name, bin_, negative=negative, side=image.shape[-1 - axis])
    shear, translate = [0.0, 0.0], [0, 0]
    moved: Tensor
    if name == "Rotate":
        moved = F.rotate(image, angle=size)
    elif name.startswith("Shear"):
        shear[axis] = math.degrees(math.atan(size))
        moved = F.affine(image, 0.0, translate, 1.0, shear, center=[0.0, 0.0])
    else:
        translate[axis] = int(size)
        moved = F.affine(image, 0.0, translate, 1.0, shear)
    return moved


def recolour(name: str, pixels: Tensor, size: float) -> Tensor:
    """Apply an operation on values to all images of a batch."""
    match name:
        case "Brightness":
            changed: Tensor = F.adjust_brightness(pixels, 1.0 + size)
        case "Color":
            changed = F.adjust_saturation(pixels, 1.0 + size)
        case "Contrast":
            changed = F.adjust_contrast(pixels, 1.0 + size)
        case "Sharpness":
            changed = _sharpened(pixels, 1.0 + size)
        case "Posterize":
            changed = F.posterize(pixels, int(size))
        case "Solarize":
            changed = pixels ^ (pixels >= 255.0 * size).to(torch.uint8).neg_()  # 255 - x above
        case "AutoContrast":
            changed = _stretched(pixels)
        case "Equalize":
            changed = F.equalize(pixels)
        case _:
            raise ValueError(f"{name=} is not one of RandAugment's operations on values.")
    return changed


def _sharpened(pixels: Tensor, factor: float) -> Tensor:
    """Blend with a blurred copy: 3x3, centre 5 and the rest 1 over 13; the border stays.

    torchvision's convolution uploads its kernel for every call, for which a GPU waits.
    """
    if min(pixels.shape[-2:]) <= 2:
        return pixels
    wide = pixels.to(torch.int16)
    rows = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[..., 1:-1, 1:-1]
    blurred = (total / 13.0).round_()
    sharp = pixels.to(torch.float32)
    inner = sharp[..., 1:-1, 1:-1]
    inner.add_(blurred.sub_(inner), alpha=1.0 - factor)
    return sharp.clamp_(0, 255).to(torch.uint8)


def _stretched(pixels: Tensor) -> Tensor:
    """Stretch each channel to 0 … 255; a channel of one value stays.

    torchvision marks such channels by a mask that indexes, whose length a GPU would have to report.
    """
    values = pixels.to(torch.float32)
    low, high = values.amin((-2, -1), keepdim=True), values.amax((-2, -1), keepdim=True)
    flat = low == high
    scale = torch.where(flat, 1.0, (high - low) * (1.0 / 255.0))
    return values.sub_(torch.where(flat, 0.0, low)).div_(scale).clamp_(0, 255).to(torch.uint8)


Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class AutoAugment:
    """RandAugment as timm's recipes configure it."""

    def __init__(self, config: str, channels: int, height: int, width: int) -> None:
        if channels != 3:
            raise UserError(
                f"augment.auto_augment={config!r} is for images of 3 channels, not {channels}; use "
                "augment.rand_augment."
            )
        self._transform = rand_augment_transform(
            config, {"translate_const": int(0.45 * min(height, width))}
        )

    def __call__(self, pixels: Pixels, index: IntArray, *, seed: int, epoch: int) -> Pixels:
        """Augment images ``[n, 3, H, W]``, each by its own sample index."""
        python, numpy = random.getstate(), np.random.get_state()
        try:
            for k, key in enumerate(hash64(seed, epoch, Stream.RAND_AUGMENT, index).tolist()):
                random.seed(key)
                np.random.seed(key & 0xFFFFFFFF)
                image = self._transform(Image.fromarray(pixels[k].transpose(1, 2, 0)))
                pixels[k] = np.asarray(image).transpose(2, 0, 1)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
        return pixels
