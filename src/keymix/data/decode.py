# SPDX-License-Identifier: Apache-2.0
"""From an image file to pixels: one conversion and one evaluation transform for every command."""

from __future__ import annotations

import io
import math
import shlex
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from keymix.data.files import regular
from keymix.errors import KeymixWarning, UserError

Size: TypeAlias = tuple[int, int]  # height, width
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom

_ORIENTATION = 0x0112  # EXIF's tag
TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
WHITE = 65535
"""The 16-bit grey value that becomes white where nobody says another."""
SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")
# What Pillow's decoders raise on damaged files; UnidentifiedImageError is an OSError.
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's decoders that read image files, whatever the files are called.

They are those of the suffixes that data may have, and the MPO of cameras comes with JPEG. Others
stay shut: Pillow hands EPS to Ghostscript, a programming language.
"""


def open_image(source: str | Path | bytes, name: str | None = None) -> Image.Image:
    """Open an image without decoding it: the one way from a file of data to Pillow."""
    path = None if isinstance(source, bytes) else regular(source)
    content = source if isinstance(source, bytes) else b""
    if not (path.stat().st_size if path else content):
        raise ValueError("the file is empty")
    image = Image.open(path or io.BytesIO(content), formats=FORMATS)
    pixels = image.width * image.height
    if Image.MAX_IMAGE_PIXELS is not None and pixels > Image.MAX_IMAGE_PIXELS:
        message = f"{name or path or 'an image'} has {image.width}x{image.height} pixels"
        message += f": decoding it takes about {3 * pixels >> 20:,} MiB"
        warnings.warn(message, KeymixWarning, stacklevel=2)
    return image


def reason(error: Exception) -> str:
    """Say in a few words what a decoder found wrong."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__


@contextmanager
def reading(name: str, remedy: str = "Replace or remove it.") -> Iterator[None]:
    """Turn what a decoder raises on a damaged image into one line that names the image."""
    try:
        yield
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f"cannot read image {name}: {reason(error)}. {remedy}") from error


def orientation(image: Image.Image) -> int:
    """Return EXIF's orientation of an opened image, 1 to 8; 1 is upright. Nothing is decoded."""
    kind = image.format
    if kind not in ("JPEG", "MPO", "TIFF", "WEBP") and not (kind == "PNG" and "exif" in image.info):
        return 1
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except DAMAGE:  # what the camera wrote says nothing; the pixels may be whole
        return 1
    return found if found in range(1, 9) else 1


def refuse_turned(image: Image.Image, name: str) -> None:
    """Refuse, with one of `DAMAGE`, an opened image that EXIF turns: its targets would not turn."""
    turned = orientation(image)
    if turned != 1:
        image.close()
        raise ValueError(
            f"EXIF turns it (orientation {turned}), but not its mask or boxes; if they "
            f"fit the turned image, run mogrify -auto-orient {shlex.quote(name)}"
        )


def upright_size(image: Image.Image) -> Size:
    """Return height and width of an opened image once it is upright."""
    if image.format != "TIFF" and orientation(image) >= 5:  # Pillow turns TIFF by itself
        return image.width, image.height
    return image.height, image.width


def dim(largest: int) -> str:
    """Say of 16-bit images that two bits or more of their values are unused; nothing else."""
    if not 0 < largest < WHITE // 4:
        return ""
    whole = (1 << largest.bit_length()) - 1  # of a camera of 10, 12 or 14 bits
    return (
        f"the largest 16-bit value is {largest:,} of 65,535, which leaves {largest // 257 + 1} "
        f"grey levels: --data.white_level {whole}, or auto, scales by it"
    )


def convert(image: Image.Image, in_chans: int, white: int | None = None) -> Image.Image:
    """Decode and convert to upright 8-bit grey (``in_chans=1``) or RGB (``in_chans=3``).

    16-bit grey is scaled so that ``white``, 65,535 by default, becomes 255; transparency is put on
    white, palettes and CMYK go through Pillow. EXIF's orientation is applied, as viewers do.
    """
    if orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    mode = "L" if in_chans == 1 else "RGB"
    transparent = image.mode in TRANSPARENT or "transparency" in image.info
    if image.mode == mode and not transparent:
        image.load()
        return image
    if image.mode in SIXTEEN_BIT:
        values, white = np.asarray(image).astype(np.int64), white or WHITE
        if values.min() < 0 or values.max() > WHITE:
            raise ValueError(f"32-bit integer pixels ({values.min()} to {values.max()})")
        scaled = np.minimum((255 * values + white // 2) // white, 255)
        image = Image.fromarray(scaled.astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels, which have no 8-bit meaning")
    elif transparent:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def fit(image: Image.Image, size: Size, crop_pct: float) -> Image.Image:
    """Resize (bicubic) so that the image covers ``size / crop_pct``, and crop the centre.

    timm's evaluation transform. An image that has the size already is left alone for crop_pct 1.
    """
    height, width = size
    if image.size == (width, height) and crop_pct == 1.0:
        return image
    scale = max(height / image.height, width / image.width) / crop_pct
    if crop_pct == 1.0:  # one step: the centre box that has the wanted shape
        return resize(image, size, _centre(image.size, width / scale, height / scale))
    whole = (
        max(width, math.floor(image.width * scale + 0.5)),
        max(height, math.floor(image.height * scale + 0.5)),
    )
    image = image.resize(whole, Image.Resampling.BICUBIC)
    left, top = (whole[0] - width) // 2, (whole[1] - height) // 2
    return image.crop((left, top, left + width, top + height))


def resize(image: Image.Image, size: Size, box: Box) -> Image.Image:
    """Cut ``box`` out of the image and resize it (bicubic, antialiased) to height and width."""
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box)


def one_colour(image: Image.Image) -> bool:
    """Return whether all pixels of a decoded image are the same."""
    low, high = np.reshape(image.getextrema(), (-1, 2)).T
    return bool((low == high).all())


def to_array(image: Image.Image) -> NDArray[np.uint8]:
    """Arrange an 8-bit image as ``[C, H, W]``."""
    array = np.asarray(image, dtype=np.uint8)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def evaluation_array(
    image: Image.Image, size: Size, in_chans: int, crop_pct: float, white: int | None = None
) -> NDArray[np.uint8]:
    """Convert, resize and crop an opened image as evaluation does, to uint8 ``[C, H, W]``."""
    return to_array(fit(convert(image, in_chans, white), size, crop_pct))


def read_image(
    path: str | Path, image_size: int | Size, in_chans: int = 3, *, crop_pct: float = 1.0
) -> Tensor:
    """Read an image file through the evaluation transform of the loaders.

    Returns uint8 ``[in_chans, H, W]``.
    """
    size = checked_size(image_size)
    if in_chans not in (1, 3):
        raise UserError(f"{in_chans=} is neither 1 (grey) nor 3 (RGB).")
    if not 0.0 < crop_pct <= 1.0:
        raise UserError(f"{crop_pct=} is not in (0, 1].")
    with reading(str(path)), open_image(path) as image:
        return torch.from_numpy(evaluation_array(image, size, in_chans, crop_pct).copy())


def checked_size(image_size: int | Size) -> Size:
    """Make height and width of an image size as given."""
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
        raise UserError(f"{image_size=} is not a number of pixels, nor height and width.")
    return pair


def fitted_size(size: Size, within: Size) -> Size:
    """Resize height and width with their proportions, as for COCO.

    The short side becomes the short one of ``within``, unless the long side would then be longer
    than the long one.
    """
    short, long = sorted(within)
    scale = min(short / min(size), long / max(size))
    height, width = (max(1, math.floor(side * scale + 0.5)) for side in size)
    return height, width


def _centre(whole: tuple[int, int], width: float, height: float) -> Box:
    width, height = min(width, whole[0]), min(height, whole[1])
    left, top = (whole[0] - width) / 2, (whole[1] - height) / 2
    return (left, top, left + width, top + height)


def resized_image(pixels: NDArray[np.uint8], size: Size) -> Tensor:
    """Resize an image (bilinear, antialiased) to height and width, proportions or not.

    Shape: uint8 ``[C, h, w]`` -> the same at ``size``.
    """
    image = torch.from_numpy(pixels.copy())
    if image.shape[-2:] == size:
        return image
    small = F.interpolate(
        image[None].float(), size, mode="bilinear", antialias=True, align_corners=False
    )
    return small[0].round().clamp(0, 255).to(torch.uint8)
