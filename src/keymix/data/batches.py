# SPDX-License-Identifier: Apache-2.0
"""What a batch is, before and after it is normalised."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Images ready for a model.

    Args:
        images: float32 ``[B, C, H, W]``, normalised by the training split's mean and deviation; of
            events, frames ``[B, T, C, H, W]`` of counts.
        targets: Class numbers, int64 ``[B]``; of masks, int64 ``[B, H, W]`` class numbers, or
            ``[B, K, H, W]`` of 0 and 1 where a pixel may have several; 255 is ignored.
        index: Positions in the split, int64 ``[B]``.
    """

    images: Tensor
    targets: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here


class Made(NamedTuple):
    """A batch on the device, before it is normalised.

    Args:
        pixels: uint8 ``[B, C, H, W]``; frames ``[B, T, C, H, W]``.
        index: Positions in the split, int64 ``[B]``.
        boxes: Rectangles to erase, int64 ``[B, 4]``; None for none.
        masks: uint8 ``[B, H, W]`` or ``[B, K, H, W]``; None without.
    """

    pixels: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    boxes: Tensor | None
    masks: Tensor | None = None
