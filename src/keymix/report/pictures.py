# SPDX-License-Identifier: Apache-2.0
"""Small pictures inside the page: test images and attention maps as PNG data URIs."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

HEAT = (255, 122, 24)
"""Colour of attention; its opacity is the weight."""

FULL = 3.0
"""Times even attention at which a patch is drawn opaque."""

OPACITY = 240
"""Opacity of a patch that is drawn opaque, of 255: the image shows through a little."""

MAX_SIDE = 128

PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")
"""What `png_uri` makes."""


def png_uri(made: Image.Image) -> str:
    """Encode a picture as the data URI of a PNG."""
    stream = io.BytesIO()
    made.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def jpeg_uri(made: Image.Image) -> str:
    """Encode a photograph as the data URI of a JPEG, a tenth of a PNG's size."""
    stream = io.BytesIO()
    made.save(stream, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def picture(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """Make a picture of an image, ``[C, H, W]`` of one or three channels."""
    if pixels.shape[0] == 1:
        return Image.fromarray(pixels[0])
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def image_uri(pixels: npt.NDArray[np.uint8], *, most: int = MAX_SIDE) -> str:
    """Encode an image as `picture` takes it, at most ``most`` pixels per side."""
    made = picture(pixels)
    if max(made.size) > most:
        made.thumbnail((most, most))
    return png_uri(made)


def heat_uri(values: Sequence[Sequence[float]]) -> str:
    """Encode an attention map as one colour whose opacity is weight over even attention.

    All maps share this scale: even attention is faint, `FULL` times as much is opaque.
    """
    weights = np.asarray(values, dtype=np.float64)
    even = weights.mean()
    alpha = weights / (FULL * even) if even > 0 else weights
    rgba = np.zeros((*weights.shape, 4), dtype=np.uint8)
    rgba[..., :3] = HEAT
    rgba[..., 3] = np.round(OPACITY * np.clip(alpha, 0, 1))
    return png_uri(Image.fromarray(rgba))
