# SPDX-License-Identifier: Apache-2.0
"""timm's RandAugment for one image at a time, drawn from (seed, epoch, sample index).

timm draws from Python's and NumPy's global generators. They are seeded for each image and get
their own state back, so that an image is augmented alike whatever came before it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

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
