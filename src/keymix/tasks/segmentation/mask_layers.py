# SPDX-License-Identifier: Apache-2.0
"""Masks as transparent pictures that a page lays over an image, which it then holds only once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from keymix.analysis.mask_pictures import GREY, Colour, rim
from keymix.report.pictures import png_uri

WHITE: Colour = (255, 255, 255)

FILL, GROUND = 120, 170
"""Opacity of a class and of ignored pixels, of 255."""

BoolArray = npt.NDArray[np.bool_]


def layer_uri(
    planes: BoolArray,
    paint: Sequence[Colour],
    *,
    outlines: BoolArray | None = None,
    grey: BoolArray | None = None,
    most: int,
) -> str:
    """Encode masks as one transparent PNG: each class filled, its rim opaque.

    Args:
        planes: One mask a class, ``[C, H, W]``; where several have a pixel, the last is drawn.
        paint: A colour a class.
        outlines: Masks whose rims are drawn over all in white, ``[C, H, W]``.
        grey: Pixels that count nowhere, ``[H, W]``.
        most: Most pixels a side; larger masks lose rows and columns.
    """
    side = max(planes.shape[-2:])
    step = -(-side // most)
    planes = planes[:, ::step, ::step]
    rgba = np.zeros((*planes.shape[1:], 4), dtype=np.uint8)
    if grey is not None:
        rgba[grey[::step, ::step]] = (*GREY, GROUND)
    for plane, colour in zip(planes, paint, strict=True):
        rgba[plane] = (*colour, FILL)
    for plane, colour in zip(planes, paint, strict=True):
        rgba[rim(plane)] = (*colour, 255)
    if outlines is not None:
        for plane in outlines[:, ::step, ::step]:
            rgba[rim(plane)] = (*WHITE, 255)
    return png_uri(Image.fromarray(rgba))
