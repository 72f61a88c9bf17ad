# SPDX-License-Identifier: Apache-2.0
"""Small pictures inside the page: test images and attention maps as data URIs."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from keymix.analysis.mask_pictures import GREY, Colour, rim

HEAT = (255, 122, 24)
"""Colour of attention; its opacity is the weight."""

FULL = 3.0
"""Times even attention at which a patch is drawn opaque where pictures share one scale."""

FILL, GROUND = 120, 170
"""Opacity of a mask and of ignored pixels, of 255."""

OPACITY = 200
"""Opacity of a patch that is drawn opaque, of 255: the image shows through a little."""

MAX_SIDE = 128

TINY = 64
"""Pixels per side up to which the page enlarges an image pixel by pixel."""

LOSSLESS = 6_000
"""Bytes of a PNG above which an image is a JPEG, where that is smaller."""

IMAGE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")
"""What `png_uri` and `image_uri` make."""


def hex_colour(colour: Sequence[int]) -> str:
    """Write red, green and blue, 0..255, as a page has it: ``#rrggbb``."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def png_uri(made: Image.Image) -> str:
    """Encode a picture as the data URI of a PNG."""
    return _uri("png", _encoded(made, "PNG"))


def layer_uri(
    planes: npt.NDArray[np.bool_],
    paint: Sequence[Colour],
    *,
    outlines: npt.NDArray[np.bool_] | None = None,
    grey: npt.NDArray[np.bool_] | None = None,
    most: int,
) -> str:
    """Encode masks as one transparent PNG: each filled, its rim opaque.

    Of several at a pixel the last is drawn. The rims of ``outlines`` come on top, in white;
    ``grey`` are pixels that count nowhere. Larger pictures than ``most`` lose rows and columns.

    Shape: ``[C, H, W]`` for masks and outlines, ``[H, W]`` for grey.
    """
    step = -(-max(planes.shape[-2:]) // most)
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
            rgba[rim(plane)] = 255
    return png_uri(Image.fromarray(rgba))


def outlines_uri(
    planes: npt.NDArray[np.bool_],
    paint: Sequence[Colour],
    truth: npt.NDArray[np.bool_],
) -> str:
    """Encode the outlines of masks as a transparent SVG; those of the truth are dashed and white.

    Shape: ``[C, H, W]`` twice.
    """
    true = "".join(map(_outline, truth))
    lines = [(true, "#000", 'stroke-width="2.6" stroke-opacity="0.5"')]  # white is seen on white
    for plane, colour in zip(planes, paint, strict=True):
        lines.append((_outline(plane), hex_colour(colour), 'stroke-width="1.8"'))
    lines.append((true, "#fff", 'stroke-width="1.2" stroke-dasharray="4 4"'))
    drawn = "".join(
        f'<path d="{path}" stroke="{colour}" {how} vector-effect="non-scaling-stroke"/>'
        for path, colour, how in lines
        if path
    )
    height, width = truth.shape[1:]
    box = f'viewBox="0 0 {width} {height}" preserveAspectRatio="none" fill="none"'
    content = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{drawn}</svg>'
    return _uri("svg+xml", content.encode())


def _outline(mask: npt.NDArray[np.bool_]) -> str:
    """Trace a mask as a path, midway between the centres of its pixels and their neighbours."""
    from contourpy import contour_generator

    traced: Any = contour_generator(z=np.pad(mask, 1).astype(np.float64)).lines(0.5)
    path = ""
    for line in traced:
        steps = np.diff(line, axis=0)  # the line is closed
        corners = line[:-1][(steps != np.roll(steps, 1, axis=0)).any(axis=1)] - 0.5
        path += "M" + " ".join(f"{x:g} {y:g}" for x, y in corners) + "Z"
    return path


def _encoded(made: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    made.save(stream, kind, optimize=True, quality=85)
    return stream.getvalue()


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def jpeg_uri(made: Image.Image) -> str:
    """Encode a photograph as the data URI of a JPEG, a tenth of a PNG's size."""
    return _uri("jpeg", _encoded(made, "JPEG"))


def picture(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """Make a picture of an image, ``[C, H, W]`` of one or three channels."""
    if pixels.shape[0] == 1:
        return Image.fromarray(pixels[0])
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def image_uri(pixels: npt.NDArray[np.uint8], *, most: int = MAX_SIDE) -> str:
    """Encode an image as `picture` takes it, at most ``most`` pixels per side.

    Few pixels are kept as they are, many as a JPEG.
    """
    made = picture(pixels)
    if max(made.size) > most:
        made.thumbnail((most, most))
    exact = _encoded(made, "PNG")
    if len(exact) <= LOSSLESS:
        return _uri("png", exact)
    small = _encoded(made, "JPEG")
    return _uri("jpeg", small) if len(small) < len(exact) else _uri("png", exact)


def heat_uri(weights: npt.NDArray[np.float64]) -> str:
    """Encode a map as one colour whose opacity goes from its least weight to its largest.

    A map of one weight throughout is clear.
    """
    low, high = weights.min(), weights.max()
    alpha = (weights - low) / (high - low) if high > low else np.zeros_like(weights)
    rgba = np.zeros((*weights.shape, 4), dtype=np.uint8)
    rgba[..., :3] = HEAT
    rgba[..., 3] = np.round(OPACITY * alpha)
    return png_uri(Image.fromarray(rgba))
