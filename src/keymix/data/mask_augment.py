# SPDX-License-Identifier: Apache-2.0
r"""Augmentation of images with masks: five operations, each with probability 0.5.

Horizontal and vertical flip, shift-scale-rotate, coarse dropout, brightness and contrast, in this
order: Hwa, Holmes and Drechsler, "Integration of Key-value Attention into Pure and Hybrid
Transformers for Semantic Segmentation", https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.3.
What moves, moves image and mask together: bilinear the one, the nearest pixel the other. Dropout
and brightness change the image alone.

The paper names operations and no ranges; these are what albumentations, whose names it uses, did
by itself at that time (`SHIFT`, `SCALE`, `ANGLE`, `HOLES`, `HOLE`, `BRIGHTNESS`): shifts by up to
0.0625 of a side, sizes times 0.9 to 1.1, turns by up to 45 degrees; eight black holes of 8 by 8
pixels in an image of 224, and in proportion in others; brightness and contrast times 0.8 to 1.2.

Holes and what is outside are black before brightness and contrast are changed; less contrast then
makes them grey, as all that is dark.

Differs: outside the image is black, and background in the mask (255, ignored, where masks have
none), as albumentations has it since version 2; before, it mirrored the image at its border.
Brightness multiplies and contrast pulls from the mean of all channels, as torchvision does it;
there, brightness added up to 0.2 of the whole range, which lightens the black around a body.

Every number is a function of (seed, epoch, sample index), and an operation's numbers are the same
whatever else is done.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from keymix.data.augment import Augment
from keymix.data.kinds import IGNORE, MaskKind
from keymix.data.random_parameters import flips
from keymix.data.sample import Size
from keymix.data.streams import Stream, uniforms

SHIFT, SCALE, ANGLE = 0.0625, 0.1, 45.0
"""Largest shift as a share of a side, change of size as a share of it, turn in degrees."""
HOLES, HOLE = 8, 8 / 224
"""Number of holes, and a hole's height and width as shares of the image's."""
BRIGHTNESS = 0.2
"""Largest change of brightness and of contrast, as a share of them."""
RARE = 1 / 3
"""Share of random crops around a class drawn at random: nnU-Net's, https://arxiv.org/abs/1809.10486."""
_DRAWS = 10 + 2 * HOLES


def outside(masks: MaskKind) -> int:
    """Say what a mask shows where a moved image shows nothing.

    Args:
        masks: What the masks are.

    Returns:
        No class where pixels may have none, else the background; 255, ignored, without one.
    """
    if masks.multilabel:
        return 0
    return IGNORE if masks.background is None else masks.background


def window_corner(
    i: int, mask: Tensor, size: Size, background: int, *, seed: int, epoch: int
) -> tuple[int, int]:
    """Choose the top left corner of a random crop of an image and its mask.

    `RARE` of all crops hold a pixel of a class drawn among those that the mask has, so that rare
    classes are seen as often as common ones. Where an image is smaller than the crop, it lies at a
    random place in it.

    `background` is the class number that is not drawn. Shape: mask ``[h, w]`` or ``[K, h, w]``.
    """
    u = uniforms(5, seed, epoch, Stream.CROP, i)[0].tolist()
    low = [min(0, own - side) for own, side in zip(mask.shape[-2:], size, strict=True)]
    high = [max(0, own - side) for own, side in zip(mask.shape[-2:], size, strict=True)]
    at = [int(u[k] * (high[k] - low[k] + 1)) + low[k] for k in range(2)]
    values = mask.as_subclass(Tensor).numpy()
    if mask.ndim == 3:
        planes = [plane == 1 for plane in values if (plane == 1).any()]
    else:
        classes = [c for c in np.unique(values).tolist() if c not in (IGNORE, background)]
        planes = [values == c for c in classes]
    if planes and u[2] < RARE:
        pixels = np.flatnonzero(planes[int(u[3] * len(planes))])
        place = divmod(int(pixels[int(u[4] * len(pixels))]), mask.shape[-1])
        at = [place[k] - int(u[k] * size[k]) for k in range(2)]
        at = [min(max(at[k], low[k]), high[k]) for k in range(2)]
    return at[0], at[1]


def augmented(
    image: Tensor, mask: Tensor, i: int, augment: Augment, *, fill: int, seed: int, epoch: int
) -> tuple[Tensor, Tensor]:
    """Augment an image and its mask.

    Args:
        image: uint8 ``[C, H, W]``, any number of channels; all are changed alike.
        mask: uint8 ``[H, W]`` or ``[K, H, W]``.
        i: The image's position in its split.
        augment: Which operations may happen.
        fill: What the mask shows outside of the image, as `outside` says.
        seed: Seed.
        epoch: Epoch.

    Returns:
        Both, of the same shapes.
    """
    u = uniforms(_DRAWS, seed, epoch, Stream.SCANS, i)[0]
    index = np.array([i], dtype=np.int64)
    both = tv_tensors.Image(image), tv_tensors.Mask(mask)
    if augment.flip and flips(index, seed=seed, epoch=epoch)[0]:
        both = _each(F.horizontal_flip, both)
    if augment.vertical_flip and u[0] < 0.5:
        both = _each(F.vertical_flip, both)
    if augment.shift_scale_rotate and u[1] < 0.5:
        both = _moved(both, u[2:6], fill)
    pixels, labels = (part.as_subclass(Tensor) for part in both)
    if augment.coarse_dropout and u[6] < 0.5:
        pixels = _dropped(pixels, u[10:].reshape(HOLES, 2))
    if augment.brightness_contrast and u[7] < 0.5:
        pixels = _lit(pixels, *(1 + BRIGHTNESS * (2 * u[8:10] - 1)))
    return pixels, labels


def _each(change: Callable[[Tensor], Tensor], both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return change(both[0]), change(both[1])


def _moved(both: tuple[Tensor, Tensor], u: NDArray[np.float64], fill: int) -> tuple[Tensor, Tensor]:
    """Shift, scale and rotate about the centre."""
    height, width = both[0].shape[-2:]
    right, down, size, angle = (2 * u - 1).tolist()
    how = {
        "angle": ANGLE * angle,
        "translate": [SHIFT * width * right, SHIFT * height * down],
        "scale": 1 + SCALE * size,
        "shear": [0.0, 0.0],
        "interpolation": InterpolationMode.BILINEAR,  # of the image; a mask takes the nearest
    }
    return F.affine(both[0], fill=0, **how), F.affine(both[1], fill=fill, **how)


def _dropped(image: Tensor, corners: NDArray[np.float64]) -> Tensor:
    """Blank holes, each wholly inside the image.

    Shape: image ``[C, H, W]``, corners ``[n, 2]`` in [0, 1) -> ``[C, H, W]``.
    """
    height, width = image.shape[-2:]
    h, w = max(1, round(HOLE * height)), max(1, round(HOLE * width))
    for y, x in corners.tolist():
        top, left = int(y * (height - h + 1)), int(x * (width - w + 1))
        image = F.erase(image, top, left, h, w, torch.zeros(1, dtype=image.dtype))
    return image


def _lit(image: Tensor, brightness: float, contrast: float) -> Tensor:
    """Multiply brightness, then contrast about the mean of all channels together."""
    plane = image.flatten(0, 1)[None]  # [1, C * H, W]: torchvision knows 1 and 3 channels only
    lit: Tensor = F.adjust_contrast(F.adjust_brightness(plane, brightness), contrast)
    return lit.view_as(image)
