# SPDX-License-Identifier: Apache-2.0
"""Pictures made for tests."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """Make an RGB image of width and height with smooth, seed-dependent content."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BILINEAR)


def encoded(seed: int, size: tuple[int, int] = (16, 16)) -> bytes:
    stream = io.BytesIO()
    picture(seed, size).save(stream, "PNG")
    return stream.getvalue()


def seed_of(name: str) -> int:
    return sum(ord(c) * 1009**k for k, c in enumerate(name)) % 10**6 * 1000
