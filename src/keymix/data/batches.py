# SPDX-License-Identifier: Apache-2.0
"""What a batch is, before and after it is normalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Normaliser:
    """Normalises pixels, (x / 255 - mean) / std, by one multiplication and one addition.

    Training, evaluation and prediction share it: ties that rounding breaks fall alike.

    Args:
        mean: Of each channel, over the training split's pixels as fractions of 255.
        std: Deviation of each, likewise.
        device: Where the pixels are.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str
    ) -> None:
        middle = torch.tensor(mean, dtype=torch.float64).view(1, -1, 1, 1)
        spread = torch.tensor(std, dtype=torch.float64).view(1, -1, 1, 1)
        self._scale = (1 / (255 * spread)).float().to(device)
        self._shift = (-middle / spread).float().to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise pixels: uint8 ``[B, C, H, W]`` -> float32."""
        return pixels.to(torch.float32).mul_(self._scale).add_(self._shift)


class Batch(NamedTuple):
    """Images ready for a model.

    Args:
        images: float32 ``[B, C, H, W]``, normalised by the training split's mean and deviation; of
            events, frames ``[B, T, C, H, W]`` of counts. A list of B images ``[C, h, w]`` where a
            task keeps images at their own sizes.
        targets: Class numbers, int64 ``[B]``; of masks, int64 ``[B, H, W]`` class numbers, or
            ``[B, K, H, W]`` of 0 and 1 where a pixel may have several; 255 is ignored. Of other
            targets, numbers ``[B, ...]``, or a list of B tensors where shapes differ.
        index: Positions in the split, int64 ``[B]``.
    """

    images: Any  # a tensor or a list of them: which one, the task of the data says
    targets: Any
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here


class Made(NamedTuple):
    """A batch on the device, before it is normalised.

    Args:
        pixels: uint8 ``[B, C, H, W]``; frames ``[B, T, C, H, W]``; or a list of images.
        index: Positions in the split, int64 ``[B]``.
        boxes: Rectangles to erase, int64 ``[B, 4]``; None for none.
        targets: The targets, where they were read with their inputs.
    """

    pixels: Tensor | list[Tensor]
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    boxes: Tensor | None
    targets: Tensor | list[Tensor] | None = None
