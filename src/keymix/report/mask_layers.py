# SPDX-License-Identifier: Apache-2.0
"""Masks as transparent pictures that a page lays over an image, which it then holds only once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from keymix.report.pictures import png_uri

Colour = tuple[int, int, int]

PALETTE: tuple[Colour, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (204, 121, 167),
    (240, 228, 66),
    (213, 94, 0),
    (0, 114, 178),
)
"""Colours that readers who confuse red and green tell apart (Okabe and Ito)."""
GREY: Colour = (128, 128, 128)
WHITE: Colour = (255, 255, 255)

FILL, GROUND = 120, 170
"""Opacity of a class and of ignored pixels, of 255."""

BoolArray = npt.NDArray[np.bool_]


def colours(number: int) -> list[Colour]:
    """Give every class a colour; beyond the palette they repeat, darker each time.

    Args:
        number: Classes.
    """
    told = []
    for i in range(number):
        turn, place = divmod(i, len(PALETTE))
        r, g, b = (round(value * 0.7**turn) for value in PALETTE[place])
        told.append((r, g, b))
    return told


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


def rim(mask: BoolArray) -> BoolArray:
    """Return the pixels of a mask beside one that is none of it; outside the picture counts.

    Shape: ``[H, W]`` -> ``[H, W]``.
    """
    padded = np.pad(mask, 1)
    inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return np.asarray(mask & ~inside)
