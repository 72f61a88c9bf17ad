# SPDX-License-Identifier: Apache-2.0
"""Masks as pictures: colours of classes, an image with what was predicted on it, mask files.

A class has the same colour wherever it is drawn: in mask files, overlays and reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.analysis.overlap import IGNORED

Colour = tuple[int, int, int]
Pixels = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]

PALETTE: tuple[Colour, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (204, 121, 167),
    (240, 228, 66),
    (213, 94, 0),
    (0, 114, 178),
)
"""Colours that readers who confuse red and green can distinguish (Okabe and Ito)."""
GREY: Colour = (128, 128, 128)
"""Colour of ignored pixels."""
FILL = 0.4
"""Opacity of a predicted mask over the image."""


def colours_of(number: int) -> list[Colour]:
    """Give every class that is drawn a colour; beyond the palette they repeat, darker each time.

    Args:
        number: Classes without the background.
    """
    colours: list[Colour] = []
    for i in range(number):
        turn, place = divmod(i, len(PALETTE))
        r, g, b = (round(value * 0.7**turn) for value in PALETTE[place])
        colours.append((r, g, b))
    return colours


def class_colours(number: int, background: int | None = None) -> list[Colour | None]:
    """Give every class a colour, and the background none.

    Args:
        number: Classes, the background among them.
        background: Number of the class that is not drawn; the others have the colours that they
            had without it. None where there is no such class.
    """
    colours: list[Colour | None] = [*colours_of(number - (background is not None))]
    if background is not None:
        colours.insert(background, None)
    return colours


def overlay(
    image: Pixels,
    mask: NDArray[Any],
    colours: Sequence[Colour | None],
    truth: NDArray[Any] | None = None,
) -> Pixels:
    """Draw masks over an image: what is predicted filled, what is true as its outline.

    The image is drawn in grey, of a stack of slices the middle one. A filled part without an
    outline was predicted by mistake, an outline without filling was missed.

    Args:
        image: One channel, three of a colour image, or a stack of slices.
        mask: What is predicted: class numbers, or a plane of 0 and 1 for each class, of which the
            last is on top.
        colours: A colour for each class, None for one that is not drawn; see `class_colours`.
        truth: What is true, likewise; 255 is ignored and drawn grey.

    Shape: uint8 ``[C, H, W]``, ``[H, W]`` or ``[K, H, W]`` twice -> uint8 ``[H, W, 3]``, RGB.

    Raises:
        ValueError: If sizes differ.
    """
    drawn = np.repeat(_grey(image)[..., None], 3, axis=2)
    for name, array in (("mask", mask), ("truth", truth)):
        if array is not None and array.shape[-2:] != image.shape[-2:]:
            raise ValueError(f"{name} {array.shape} is not of the size of the image {image.shape}")
    if truth is not None:
        nowhere = truth == IGNORED
        _fill(drawn, nowhere if truth.ndim == 2 else nowhere.any(axis=0), GREY)
    for plane, colour in zip(planes(mask, len(colours)), colours, strict=True):
        if colour is not None:
            _fill(drawn, plane, colour)
    if truth is not None:
        for plane, colour in zip(planes(truth, len(colours)), colours, strict=True):
            if colour is not None:
                drawn[rim(plane)] = colour
    return drawn


def planes(mask: NDArray[Any], classes: int) -> BoolArray:
    """Split a mask into one of each class; ignored pixels are in none.

    Shape: class numbers ``[H, W]``, or 0 and 1 ``[K, H, W]`` -> bool ``[K, H, W]``.
    """
    if mask.ndim == 2:
        return np.stack([mask == number for number in range(classes)])
    return np.asarray(mask == 1)


def rim(mask: BoolArray) -> BoolArray:
    """Return the pixels of a mask next to one outside it; outside the picture counts.

    Shape: ``[H, W]`` -> ``[H, W]``.
    """
    padded = np.pad(mask, 1)
    inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return np.asarray(mask & ~inside)


def mask_picture(mask: NDArray[Any], colours: Sequence[Colour | None]) -> Image.Image:
    """Make a PNG's picture of class numbers: a viewer shows colours, a reader gets the numbers.

    Args:
        mask: Class numbers; 255 is ignored and shown grey.
        colours: A colour for each class, at most 255; None, shown black, for the background.

    Shape: ``[H, W]`` -> a palette picture of that size.

    Raises:
        ValueError: If a class has no colour.
    """
    inside = mask[mask != IGNORED]
    if inside.size and not 0 <= inside.min() <= inside.max() < len(colours) <= IGNORED:
        raise ValueError(f"mask has classes beyond its {len(colours)} colours")
    table = np.zeros((256, 3), dtype=np.uint8)
    for number, colour in enumerate(colours):
        table[number] = colour or (0, 0, 0)
    table[IGNORED] = GREY
    picture = Image.fromarray(np.ascontiguousarray(mask, dtype=np.uint8))
    picture.putpalette(table.tobytes())
    return picture


def _grey(image: Pixels) -> Pixels:
    if image.shape[0] == 3:
        colour = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
        return np.asarray(colour.convert("L"))
    middle: Pixels = image[image.shape[0] // 2]
    return middle


def _fill(drawn: Pixels, where: BoolArray, colour: Colour) -> None:
    """Blend a translucent colour over some pixels, in place."""
    mixed = drawn[where] * (1 - FILL) + np.array(colour) * FILL
    drawn[where] = mixed.round().astype(np.uint8)
