# SPDX-License-Identifier: Apache-2.0
r"""Augmentation of frames: a mirror, and one random operation, alike for all frames of a recording.

Published recipes for CIFAR10-DVS and DVS128 Gesture mirror with probability 0.5 and apply one of a
few operations (their "SNNAugmentWide"): shear by up to 0.3, translation by up to 5 pixels, rotation
by up to 30 degrees, cutout. Here each of shear (along x), translation along x, along y, rotation
and cutout (a square of up to 30 pixels) is as likely as the others, and its size is drawn
uniformly. Lengths are those of a frame of 128 pixels and shrink with it. Every pixel is taken from
the nearest one: counts stay counts.

Differs: their magnitudes are one of 31 steps.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.pixels import take
from keymix.data.random_parameters import flips
from keymix.data.streams import IntArray, Stream, uniforms

_Bools: TypeAlias = NDArray[np.bool_]

OPERATIONS = ("shear", "translate_x", "translate_y", "rotate", "cutout")
SHEAR, SHIFT, ANGLE, HOLE = 0.3, 5 / 128, math.radians(30), 30 / 128
"""Largest shear, shares of a side that a picture moves and that a hole has, and angle."""


def augmented_frames(
    frames: Tensor, index: IntArray, *, flip: bool, wide: bool, seed: int, epoch: int
) -> Tensor:
    """Augment the frames of recordings, each as a function of (seed, epoch, index)."""
    B, T, C, H, W = frames.shape
    if not flip and not wide:
        return frames
    mirrored = flips(index, seed=seed, epoch=epoch) if flip else np.zeros(B, dtype=bool)
    source = _source(index, mirrored, (H, W), wide=wide, seed=seed, epoch=epoch)
    return take(frames.view(B, T * C, H, W), torch.from_numpy(source)).view(B, T, C, H, W)


def _source(
    index: IntArray, mirrored: _Bools, size: tuple[int, int], *, wide: bool, seed: int, epoch: int
) -> IntArray:
    """Say where each pixel comes from, ``[B, H * W]``; -1 is outside."""
    H, W = size
    y = np.arange(H)[None, :, None] + np.zeros((len(index), 1, W))
    x = np.arange(W)[None, None, :] + np.zeros((len(index), H, 1))
    outside = np.zeros((len(index), H, W), dtype=bool)
    if wide:
        draws = uniforms(5, seed, epoch, Stream.FRAMES, index)
        which = (draws[:, 0] * len(OPERATIONS)).astype(np.int64)
        much = 2 * draws[:, 1] - 1  # in [-1, 1)
        shear, right, down, angle = (
            np.where(which == k, much * most, 0.0)[:, None, None]
            for k, most in enumerate((SHEAR, SHIFT * W, SHIFT * H, ANGLE))
        )
        u, v = x - (W - 1) / 2, y - (H - 1) / 2  # from the centre
        holes = _holes(draws, size) & (which == OPERATIONS.index("cutout"))[:, None, None]
        x = np.rint(np.cos(angle) * u + (np.sin(angle) + shear) * v + (W - 1) / 2 - right)
        y = np.rint(np.cos(angle) * v - np.sin(angle) * u + (H - 1) / 2 - down)
        outside = holes | (x < 0) | (x >= W) | (y < 0) | (y >= H)
    x = np.where(mirrored[:, None, None], W - 1 - x, x)
    return np.where(outside, -1, y * W + x).reshape(len(index), H * W).astype(np.int64)


def _holes(draws: NDArray[np.float64], size: tuple[int, int]) -> _Bools:
    """Mark a square around a random pixel, 1 pixel per side or up to its share; ``[B, H, W]``."""
    inside = []
    for side, centre in zip(size, (draws[:, 3], draws[:, 4]), strict=True):
        length = 1 + np.floor(draws[:, 2] * HOLE * side)
        first = np.floor(centre * side) - np.floor(length / 2)
        place = np.arange(side)[None, :]
        inside.append((place >= first[:, None]) & (place < (first + length)[:, None]))
    marked: _Bools = inside[0][:, :, None] & inside[1][:, None, :]
    return marked
