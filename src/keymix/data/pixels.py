# SPDX-License-Identifier: Apache-2.0
"""Geometry of whole batches on any device: one gather, no loop over images, no wait for the device.

A source map says for every pixel of an image which pixel it comes from, in reading order; -1 is
outside the image, which is black.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keymix.data.kinds import RECORDING, SLICES, InputKind
from keymix.data.streams import Stream, device_uniforms


def take(pixels: Tensor, source: Tensor) -> Tensor:
    """Let every pixel come from another place of its image."""
    B, C, H, W = pixels.shape
    places = source.clamp(min=0)[:, None].expand(B, C, H * W)
    taken = pixels.flatten(2).gather(2, places)
    return taken.mul_((source >= 0)[:, None]).view(B, C, H, W)


def shift_and_flip(
    pixels: Tensor, corners: Tensor | None, flipped: Tensor | None, padding: int
) -> Tensor:
    """Cut crops of the image's size out of zero-padded images, then mirror some left and right."""
    if corners is None and flipped is None:
        return pixels
    B, _, H, W = pixels.shape
    y = torch.arange(H, device=pixels.device).expand(B, H)
    x = torch.arange(W, device=pixels.device).expand(B, W)
    if flipped is not None:
        x = torch.where(flipped[:, None], W - 1 - x, x)  # the crop's columns, from right to left
    if corners is not None:
        y = y + (corners[:, :1] - padding)
        x = x + (corners[:, 1:] - padding)
    inside_y, inside_x = (y >= 0) & (y < H), (x >= 0) & (x < W)
    source = y[:, :, None] * W + x[:, None, :]  # [B, H, W]
    inside = inside_y[:, :, None] & inside_x[:, None, :]
    return take(pixels, torch.where(inside, source, -1).flatten(1))


def erase(images: Tensor, boxes: Tensor, noise: Tensor | None = None) -> Tensor:
    """Set a rectangle of each image to 0, in place: the mean colour, once normalised."""
    H, W = images.shape[-2:]
    top, left, h, w = boxes[:, :, None].unbind(1)  # [B, 1] each
    y = torch.arange(H, device=images.device)
    x = torch.arange(W, device=images.device)
    rows, columns = (y >= top) & (y < top + h), (x >= left) & (x < left + w)
    inside = rows[:, :, None] & columns[:, None, :]  # [B, H, W]
    if noise is None:
        return images.masked_fill_(inside[:, None], 0.0)
    return images.copy_(torch.where(inside[:, None], noise, images))


class Noise:
    """Gaussian noise for each image: its own window of one field that is drawn once."""

    def __init__(
        self, channels: int, height: int, width: int, seed: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = (height, width)
        self.seed = seed
        self._field = torch.randn(channels, 2 * height, 2 * width, generator=generator).to(device)

    def __call__(self, index: Tensor, epoch: int) -> Tensor:
        """Give each sample its window, a function of (seed, epoch, index): ``[B, C, H, W]``."""
        H, W = self.size
        draws = device_uniforms(2, self.seed, epoch, Stream.NOISE, index=index)
        top, left = (draws[:, 0] * (H + 1)).long(), (draws[:, 1] * (W + 1)).long()
        y = top[:, None] + torch.arange(H, device=index.device)
        x = left[:, None] + torch.arange(W, device=index.device)
        return self._field[:, y[:, :, None], x[:, None, :]].transpose(0, 1)


def picture_of(frames: Tensor) -> Tensor:
    """Draw frames: red where it became darker and blue where brighter, over all time.

    Shape: ``[T, 2, H, W]`` -> uint8 ``[3, H, W]``.
    """
    counts = frames.sum(0).double()  # [2, H, W]
    shown = (counts / counts.amax().clamp(min=1)).sqrt().mul(255).to(torch.uint8)
    return torch.stack([shown[0], torch.zeros_like(shown[0]), shown[1]])


class Normaliser:
    """Normalises pixels, (x / 255 - mean) / std, by one multiplication and one addition.

    Training, evaluation and prediction share it: ties that rounding breaks fall alike.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str
    ) -> None:
        middle = torch.tensor(mean, dtype=torch.float64).view(1, -1, 1, 1)
        spread = torch.tensor(std, dtype=torch.float64).view(1, -1, 1, 1)
        self._scale = (1 / (255 * spread)).float().to(device)
        self._shift = (-middle / spread).float().to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise pixels, 0..255: ``[B, C, H, W]`` -> float32."""
        return pixels.to(torch.float32, copy=True).mul_(self._scale).add_(self._shift)


def prepared(
    pixels: Tensor, kind: InputKind, *, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Turn what was read, ``[*, C, H, W]``, into what a model takes, float32.

    Recordings are the counts that they are; images are normalised.
    """
    if not kind.normalised:
        return pixels.float()
    batch = pixels.reshape(-1, *pixels.shape[-3:])
    return Normaliser(mean, std, pixels.device)(batch).reshape(pixels.shape)


def picture(pixels: Tensor, kind: InputKind) -> Tensor:
    """Make of what was read what a person looks at, uint8 ``[C, H, W]``.

    Of frames, where it became darker and brighter; of a stack of slices, the middle one.
    """
    if kind is RECORDING:
        return picture_of(pixels)
    return pixels[len(pixels) // 2][None] if kind is SLICES else pixels
