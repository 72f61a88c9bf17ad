# SPDX-License-Identifier: Apache-2.0
"""Instances over an image: masks filled, boxes as frames with class and score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from keymix.analysis.mask_pictures import PALETTE, Colour, rim

FILL = 0.4
"""Opacity of a mask over the image."""
_DARK, _LIGHT = (0, 0, 0), (255, 255, 255)


def colour_of(label: int) -> Colour:
    """Return the colour of a class, by its number from 1 on.

    Beyond the palette colours repeat, as bright as before: a box has the name of its class on it.
    """
    return PALETTE[(label - 1) % len(PALETTE)]


def overlay(
    pixels: NDArray[np.uint8],
    boxes: NDArray[np.floating],
    masks: NDArray[np.bool_] | None,
    labels: Sequence[int],
    texts: Sequence[str],
) -> Image.Image:
    """Draw instances over an image, the first ones on top; `texts` stand at the boxes.

    Shape: uint8 ``[C, h, w]`` of one or three channels; ``[n, 4]``, ``[n, h, w]`` or None.
    """
    drawn = np.ascontiguousarray(pixels[:3].transpose(1, 2, 0))
    drawn = np.repeat(drawn, 3 // drawn.shape[2], axis=2)
    for mask, label in [] if masks is None else [*zip(masks, labels, strict=True)][::-1]:
        filled = np.array(colour_of(label))
        mixed = drawn[mask] * (1 - FILL) + filled * FILL
        drawn[mask] = mixed.round().astype(np.uint8)
        drawn[rim(mask)] = filled
    picture = Image.fromarray(drawn)
    draw = ImageDraw.Draw(picture)
    side = max(10, min(picture.size) // 32)
    font = ImageFont.load_default(side)
    for i in reversed(range(len(labels))):
        colour = colour_of(labels[i])
        left, top, right, bottom = (round(float(x)) for x in boxes[i])
        corner = (max(left, right), max(top, bottom))
        draw.rectangle(((left, top), corner), outline=colour, width=max(1, side // 6))
        _write(draw, texts[i], (left, top), colour, font, picture.width)
    return picture


def _write(
    draw: ImageDraw.ImageDraw,
    text: str,
    corner: tuple[int, int],
    colour: Colour,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    width: int,
) -> None:
    """Write a text above a corner, within the picture, on a ground of its colour."""
    _, _, right, bottom = draw.textbbox((0, 0), text, font=font)
    x = max(0, min(corner[0], round(width - right)))
    y = max(0, round(corner[1] - bottom - 2))
    draw.rectangle((x, y, x + round(right) + 2, y + round(bottom) + 2), fill=colour)
    bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
    draw.text((x + 1, y + 1), text, fill=_DARK if bright else _LIGHT, font=font)
