# SPDX-License-Identifier: Apache-2.0
"""Makes batches: crop, flip, RandAugment, erasing, all a function of (seed, epoch, sample index).

Numbers come from `keymix.data.streams`, so an image is augmented alike whatever the batch size, the
number of workers or ranks, and whatever else draws random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.dataset import Split
from keymix.data.decode import resize, to_array
from keymix.data.streams import IntArray, Stream, hash64, uniforms

_TRIES = 10  # boxes drawn before giving up, as torchvision and timm do
_CROP_RATIO = (3 / 4, 4 / 3)
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_RATIO = (0.3, 1 / 0.3)


def evaluation_batch(split: Split, index: IntArray) -> Tensor:
    """Read images as evaluation sees them, uint8 ``[B, C, H, W]``."""
    if split.images is not None:
        return split.images.index_select(0, torch.from_numpy(index))
    return torch.stack([split.read(int(i)) for i in index])


def training_batch(
    split: Split, index: IntArray, augment: Augment, *, seed: int, epoch: int
) -> Tensor:
    """Read images through crop, flip and RandAugment, uint8 ``[B, C, H, W]``."""
    if split.images is not None:
        pixels = split.images.numpy()[index]
        pixels = _crop(pixels, augment.crop_padding, index, seed, epoch)
    else:
        pixels = _random_resized_crop(split, augment.random_resized_crop, index, seed, epoch)
    if augment.flip:
        flipped = uniforms(1, seed, epoch, Stream.FLIP, index)[:, 0] < 0.5
        pixels[flipped] = pixels[flipped][..., ::-1]
    images = torch.from_numpy(pixels)
    return _rand_augment(images, augment.rand_augment, index, seed, epoch)


def erase(images: Tensor, probability: float, index: IntArray, *, seed: int, epoch: int) -> Tensor:
    """Set a random rectangle of some images to 0, in place: the mean colour, once normalised."""
    if probability == 0.0:
        return images
    height, width = images.shape[-2:]
    draws = uniforms(1 + 4 * _TRIES, seed, epoch, Stream.ERASING, index)
    boxes, fits = _boxes(draws[:, 1:], height, width, _ERASED_AREA, _ERASED_RATIO)
    values = images.numpy()
    for i in np.flatnonzero((draws[:, 0] < probability) & fits).tolist():
        top, left, h, w = boxes[i].tolist()
        values[i, :, top : top + h, left : left + w] = 0.0
    return images


def _crop(
    pixels: NDArray[np.uint8], padding: int, index: IntArray, seed: int, epoch: int
) -> NDArray[np.uint8]:
    """Pad with zeros and crop back to size at a random place."""
    if padding == 0:
        return pixels
    B, C, H, W = pixels.shape
    padded = np.zeros((B, C, H + 2 * padding, W + 2 * padding), dtype=np.uint8)
    padded[:, :, padding : padding + H, padding : padding + W] = pixels
    corners = uniforms(2, seed, epoch, Stream.CROP, index) * (2 * padding + 1)
    for i, (top, left) in enumerate(corners.astype(np.int64).tolist()):
        pixels[i] = padded[i, :, top : top + H, left : left + W]
    return pixels


def _random_resized_crop(
    split: Split, area: tuple[float, float], index: IntArray, seed: int, epoch: int
) -> NDArray[np.uint8]:
    """Cut a box of random area and shape out of each image and resize it (Inception's crop)."""
    draws = uniforms(4 * _TRIES, seed, epoch, Stream.CROP, index)
    pixels = np.empty((len(index), split.in_chans, *split.image_size), dtype=np.uint8)
    for k, i in enumerate(index.tolist()):
        image = split.decoded(i)
        (box,), (fits,) = _boxes(draws[k : k + 1], image.height, image.width, area, _CROP_RATIO)
        top, left, h, w = box.tolist() if fits else _centre_box(image.height, image.width)
        pixels[k] = to_array(resize(image, split.image_size, (left, top, left + w, top + h)))
    return pixels


def _boxes(
    draws: NDArray[np.float64],
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[IntArray, NDArray[np.bool_]]:
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


def _centre_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Cut the largest centre box of an allowed shape, for images too long for any try."""
    w = min(width, round(height * _CROP_RATIO[1]))
    h = min(height, round(width / _CROP_RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def _rand_augment(
    images: Tensor, strength: tuple[int, int], index: IntArray, seed: int, epoch: int
) -> Tensor:
    operations, magnitude = strength
    if operations == 0:
        return images
    from torchvision.transforms.v2 import RandAugment

    transform = RandAugment(num_ops=operations, magnitude=magnitude)
    seeds = hash64(seed, epoch, Stream.RAND_AUGMENT, index) >> np.uint64(1)
    with _own_random_numbers() as generator:
        for i, sample_seed in enumerate(seeds.tolist()):
            generator.manual_seed(sample_seed)
            images[i] = transform(images[i])
    return images


@contextmanager
def _own_random_numbers() -> Iterator[torch.Generator]:
    """Lend torch's CPU generator and put its state back. GPU generators are left alone."""
    with torch.random.fork_rng(devices=[]):
        yield torch.default_generator
