# SPDX-License-Identifier: Apache-2.0
"""Images at their own size, in overlapping windows of the size that a model was trained on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.data.record import DataRecord
from keymix.data.sample import Size
from keymix.errors import KeymixWarning, UserError

AT_ONCE = 4
"""Windows that a model is given together."""


class SlidingWindows(nn.Module):
    """A segmenter that takes images of any size and answers each at its own.

    Logits of windows that overlap are averaged with Gaussian weights, which are largest in a
    window's middle: MONAI's ``sliding_window_inference``, with what it does by default. An image
    that fits one window is answered as by the model itself. Smaller ones are padded with black at
    the bottom and the right; in training they lie at a random place in black.

    `model` takes images of a window's `size`, height and width in pixels; `overlap` is the share,
    0 to below 1, by which neighbouring windows overlap; `black` is what black is in each channel of
    a normalised image.

    Shape: a list of ``[C, h, w]`` -> a list of ``[K, h, w]``.
    """

    def __init__(
        self, model: nn.Module, *, size: Size, overlap: float, black: Sequence[float]
    ) -> None:
        super().__init__()
        try:
            from monai.inferers.utils import sliding_window_inference
        except ImportError as error:
            raise UserError(
                "sliding windows (window_overlap) need MONAI: pip install 'keymix[medical]'"
            ) from error
        self.model, self.size, self.overlap, self.black = model, size, overlap, black
        self._slide = sliding_window_inference

    def forward(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Answer images, each by itself."""
        return [self._answered(image) for image in images]

    def _answered(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        over = max(self.size[0] - height, 0), max(self.size[1] - width, 0)
        if all(over):
            text = "images that are smaller than a window of {}x{} pixels are padded with black"
            warnings.warn(text.format(*self.size), KeymixWarning, stacklevel=2)
        if any(over):
            black = image.new_tensor(self.black)[:, None, None]
            image = F.pad(image - black, (0, over[1], 0, over[0])) + black
        if image.shape[-2:] == self.size:
            logits = self.model(image[None])
        else:
            logits = self._slide(
                image[None], self.size, AT_ONCE, self.model, overlap=self.overlap, mode="gaussian"
            )
        return torch.as_tensor(logits)[0, :, :height, :width]


def seen_whole(model: nn.Module, record: DataRecord, size: Size) -> nn.Module:
    """Return what answers images as evaluation serves them: a model, or its sliding windows."""
    if record.window_overlap is None:
        return model
    black = [-mean / std for mean, std in zip(record.mean, record.std, strict=True)]
    return SlidingWindows(model, size=size, overlap=record.window_overlap, black=black)
