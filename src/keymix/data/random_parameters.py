# SPDX-License-Identifier: Apache-2.0
"""What chance decides about images: crops, flips, operations, erased boxes.

Every number is a function of (seed, epoch, sample index) through `keymix.data.streams`, so an image
is augmented alike whatever the batch size, the device, the number of workers or ranks, and whatever
else draws random numbers.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from keymix.data.streams import IntArray, Stream, uniforms

BoolArray: TypeAlias = NDArray[np.bool_]

TRIES = 10  # boxes drawn before giving up, as torchvision and timm do
CROP_RATIO = (3 / 4, 4 / 3)
OPERATIONS = 14  # of RandAugment
SCALES = 11  # of multi-scale training
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_RATIO = (0.3, 1 / 0.3)
_BLOCK = 1 << 14  # images whose boxes are drawn at once: 41 numbers each


def crop_corners(index: IntArray, padding: int, *, seed: int, epoch: int) -> IntArray:
    """Choose the top left corners of crops out of padded images.

    Shape: index ``[n]`` -> ``[n, 2]`` (top, left), each from 0 to ``2 * padding`` pixels.
    """
    draws = uniforms(2, seed, epoch, Stream.CROP, index)
    return (draws * (2 * padding + 1)).astype(np.int64)


def flips(index: IntArray, *, seed: int, epoch: int) -> BoolArray:
    """Choose the images to mirror, each with probability 0.5; ``[n]`` -> ``[n]``."""
    return uniforms(1, seed, epoch, Stream.FLIP, index)[:, 0] < 0.5


def short_side(i: int, least: int, most: int, *, seed: int, epoch: int) -> int:
    """Choose the short side of image ``i``: one of `SCALES` from least to most, equally far apart.

    From 480 to 800 these are the 480, 512, …, 800 of multi-scale training on COCO.
    """
    step = int(uniforms(1, seed, epoch, Stream.SCALE, i)[0, 0] * SCALES)
    return least + round(step * (most - least) / (SCALES - 1))


def operations(index: IntArray, count: int, *, seed: int, epoch: int) -> IntArray:
    """Choose RandAugment's operations and signs: ``2 * operation + negative``, all equally likely.

    Shape: index ``[n]`` -> ``[n, count]``.
    """
    draws = uniforms(2 * count, seed, epoch, Stream.RAND_AUGMENT, index)
    chosen = (draws[:, :count] * OPERATIONS).astype(np.int64)
    negative = draws[:, count:] < 0.5
    return 2 * chosen + negative


def resized_crop(
    i: int,
    height: int,
    width: int,
    area: tuple[float, float],
    *,
    shape: float = 1.0,
    seed: int,
    epoch: int,
) -> tuple[int, int, int, int]:
    """Choose a box of random area and shape in image ``i`` (Inception's crop).

    An image too long for any try gets the largest centre box of an allowed shape. Where the box is
    resized to an oblong, shapes vary around that oblong's (torchvision's and timm's around the
    square), so that training stretches images by at most 4/3 and evaluation, which keeps
    proportions, sees what it saw.

    Returns top, left, height, width.
    """
    draws = uniforms(4 * TRIES, seed, epoch, Stream.CROP, i)
    ratio = (CROP_RATIO[0] * shape, CROP_RATIO[1] * shape)
    (box,), (fits,) = boxes(draws, height, width, area, ratio)
    if not fits:
        return _centre_box(height, width, ratio)
    top, left, h, w = box.tolist()
    return top, left, h, w


def erased_boxes(
    index: IntArray, probability: float, height: int, width: int, *, seed: int, epoch: int
) -> IntArray:
    """Choose the rectangles to erase; those of images that stay whole have no height.

    Shape: index ``[n]`` -> ``[n, 4]`` (top, left, height, width).
    """
    made = np.zeros((len(index), 4), dtype=np.int64)
    for a in range(0, len(index), _BLOCK):
        some = slice(a, a + _BLOCK)
        draws = uniforms(1 + 4 * TRIES, seed, epoch, Stream.ERASING, index[some])
        chosen, fits = boxes(draws[:, 1:], height, width, _ERASED_AREA, _ERASED_RATIO)
        erased = (draws[:, 0] < probability) & fits
        made[some][erased] = chosen[erased]
    return made


def boxes(
    draws: NDArray[np.float64],
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[IntArray, BoolArray]:
    """Choose boxes of random area and log-uniform shape: the first of ten tries that fits.

    Shape: draws ``[B, 4 * tries]`` -> boxes ``[B, 4]`` (top, left, height, width), fits ``[B]``.
    """
    u = draws.reshape(len(draws), -1, 4)  # [B, tries, 4]
    target = (area[0] + (area[1] - area[0]) * u[..., 0]) * height * width
    low, high = math.log(ratio[0]), math.log(ratio[1])
    shape = np.exp(low + (high - low) * u[..., 1])  # width / height
    w = np.rint(np.sqrt(target * shape)).astype(np.int64)
    h = np.rint(np.sqrt(target / shape)).astype(np.int64)
    good = (w >= 1) & (h >= 1) & (w <= width) & (h <= height)
    top = (u[..., 2] * (height - h + 1)).astype(np.int64)
    left = (u[..., 3] * (width - w + 1)).astype(np.int64)
    first = good.argmax(axis=1)
    every = np.arange(len(u))
    return np.stack([top, left, h, w], axis=-1)[every, first], good[every, first]


def _centre_box(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return (height - h) // 2, (width - w) // 2, h, w
