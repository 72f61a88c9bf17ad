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
    """Images ready for a model."""

    images: Any  # a tensor or a list of them: which one, the task of the data says
    # class numbers, int64 ``[B]``; of masks, int64 ``[B, H, W]`` class numbers, or ``[B, K, H,
    # W]`` of 0 and 1 where a pixel may have several; 255 is ignored. Of other targets, numbers
    # ``[B, ...]``, or a list of B tensors where shapes differ
    targets: Any
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here


class Made(NamedTuple):
    """A batch on the device, before it is normalised."""

    # uint8 ``[B, C, H, W]``; frames ``[B, T, C, H, W]``; or a list of images
    pixels: Tensor | list[Tensor]
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    boxes: Tensor | None  # rectangles to erase, int64 ``[B, 4]``; None for none
    # the targets, where they were read with their inputs
    targets: Tensor | list[Tensor] | None = None
