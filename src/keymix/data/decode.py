# SPDX-License-Identifier: Apache-2.0
"""From an image file to pixels: one conversion and one evaluation transform for every command."""

from __future__ import annotations

import hashlib
import io
import math
import shlex
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from keymix.arguments import whole_size
from keymix.data.sample import REMEDY, Size, Stored
from keymix.errors import KeymixWarning, UserError

Pixels: TypeAlias = NDArray[np.uint8]
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom

_ORIENTATION = 0x0112  # EXIF's tag
_HEAD = 1 << 16  # bytes of an encoded image that enter a fingerprint
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
    path = None if isinstance(source, bytes) else Path(source)
    content = source if isinstance(source, bytes) else b""
    if not (path.stat().st_size if path else content):
        raise ValueError("it is empty")
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


def pixels_of(image: Image.Image) -> Tensor:
    """Decode an opened image, upright as EXIF says it.

    Grey stays grey, of 8 or 16 bits; transparency is put on white, palettes and CMYK become RGB.

    Shape: -> ``[1, H, W]`` uint8 or uint16, or ``[3, H, W]`` uint8.
    """
    if orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BIT:
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > WHITE:
            raise ValueError(f"32-bit integer pixels ({values.min()} to {values.max()})")
        return torch.from_numpy(values.astype(np.uint16))[None]
    if image.mode == "F":
        raise ValueError("floating-point pixels, which have no 8-bit meaning")
    if image.mode in TRANSPARENT or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return _tensor(image.convert("L" if image.mode in ("1", "L") else "RGB"))


def in_channels(pixels: Tensor, channels: int, white: int | None = None) -> Tensor:
    """Bring pixels to 0..255 and to a number of channels: grey is repeated, RGB becomes grey.

    16-bit grey is scaled so that ``white``, 65,535 by default, becomes 255.

    Shape: ``[c, H, W]`` -> ``[channels, H, W]``, uint8, or float32 of float32.
    """
    if pixels.dtype == torch.uint16:
        values, white = pixels.numpy().astype(np.int64), white or WHITE
        scaled = np.minimum((255 * values + white // 2) // white, 255)
        pixels = torch.from_numpy(scaled.astype(np.uint8))
    elif pixels.is_floating_point():
        pixels = 255 * pixels
    if len(pixels) == channels:
        return pixels
    if len(pixels) == 1:
        return pixels.repeat(channels, 1, 1)
    if channels != 1 or len(pixels) != 3:
        raise ValueError(f"{len(pixels)} channels, and {channels} are wanted")
    weights = torch.tensor([19595, 38470, 7471]).view(3, 1, 1)  # of ITU-R 601, times 2^16
    total = (pixels * weights).sum(0, keepdim=True)
    whole = pixels.dtype == torch.uint8
    return ((total + (1 << 15)) >> 16).to(torch.uint8) if whole else total / (1 << 16)


def convert(image: Image.Image, in_chans: int, white: int | None = None) -> Image.Image:
    """Decode and convert to upright 8-bit grey (``in_chans=1``) or RGB (``in_chans=3``)."""
    return to_image(in_channels(pixels_of(image), in_chans, white))


def to_image(pixels: Tensor) -> Image.Image:
    """Make an image of uint8 pixels, ``[1, H, W]`` or ``[3, H, W]``."""
    array = pixels.numpy()
    return Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))


def _tensor(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


@dataclass(frozen=True)
class Encoded(Stored):
    """An encoded image, in a file or in memory.

    Args:
        source: The file, or its content.
        name: What messages call it.
        key: What of its name enters a fingerprint.
        placed: Whether a mask or boxes belong to it, so that EXIF must not turn it.
        remedy: What to do if it is damaged.
    """

    source: str | Path | bytes
    name: str
    key: str = ""
    placed: bool = False
    remedy: str = REMEDY

    def open(self) -> Image.Image:
        """Open it without decoding it. Pillow's errors pass through."""
        image = open_image(self.source, self.name)
        if self.placed:
            refuse_turned(image, self.name)
        return image

    def __call__(self) -> Tensor:
        """Decode it, as `pixels_of` does."""
        with reading(self.name, self.remedy), self.open() as image:
            return pixels_of(image)

    def content(self) -> bytes:
        """Read it as it is stored."""
        return self.source if isinstance(self.source, bytes) else Path(self.source).read_bytes()

    def check(self, *, decode: bool) -> Size:
        """Verify it, or decode it; of a JPEG file all is read, but fewer pixels are made of it."""
        with self.open() as image:
            size = upright_size(image)
            if not decode:
                image.verify()
                return size
            if image.format == "JPEG":
                image.draft(image.mode, (1, 1))
            pixels_of(image)
        return size

    def digest(self, *, content: bool = True) -> bytes:
        """Hash its length, its key and, with ``content``, its first 64 KiB."""
        if isinstance(self.source, bytes):
            return head_digest(len(self.source), self.key.encode() + self.source)
        head = b""
        if content:
            with Path(self.source).open("rb") as stream:
                head = stream.read(_HEAD)
        return head_digest(Path(self.source).stat().st_size, self.key.encode() + head)


def head_digest(length: int, head: bytes) -> bytes:
    """Hash an encoded image's length and its first 64 KiB."""
    return hashlib.sha256(length.to_bytes(8, "little") + head[:_HEAD]).digest()


def fit(pixels: Tensor, size: Size, crop_pct: float) -> Tensor:
    """Resize (bicubic) so that the image covers ``size / crop_pct``, and crop the centre.

    timm's evaluation transform. An image that has the size already is left alone for crop_pct 1.

    Shape: ``[C, h, w]`` -> the same at ``size``.
    """
    if pixels.shape[-2:] == size and crop_pct == 1.0:
        return pixels
    return by_pillow(pixels, lambda image: _fitted(image, size, crop_pct))


def by_pillow(pixels: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Let Pillow change an image: at once where it is 8-bit grey or RGB, else plane by plane."""
    if pixels.dtype == torch.uint8 and len(pixels) in (1, 3):
        return _tensor(change(to_image(pixels)))
    planes = [change(Image.fromarray(plane.numpy())) for plane in pixels]
    return torch.cat([_tensor(plane) for plane in planes])


def _fitted(image: Image.Image, size: Size, crop_pct: float) -> Image.Image:
    height, width = size
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


def read_image(
    path: str | Path, image_size: int | Size, in_chans: int = 3, *, crop_pct: float = 1.0
) -> Tensor:
    """Read an image file through the evaluation transform of the loaders.

    Returns uint8 ``[in_chans, H, W]``.
    """
    size = whole_size("image_size", image_size)
    if in_chans not in (1, 3):
        raise UserError(f"{in_chans=} is neither 1 (grey) nor 3 (RGB).")
    if not 0.0 < crop_pct <= 1.0:
        raise UserError(f"{crop_pct=} is not in (0, 1].")
    with reading(str(path)), open_image(path) as image:
        return fit(in_channels(pixels_of(image), in_chans), size, crop_pct)


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


def resized_image(image: Tensor, size: Size) -> Tensor:
    """Resize an image (bilinear, antialiased) to height and width, proportions or not.

    Shape: ``[C, h, w]`` -> the same at ``size``.
    """
    if image.shape[-2:] == size:
        return image
    small = F.interpolate(
        image[None].float().contiguous(), size, mode="bilinear", antialias=True, align_corners=False
    )[0]
    return small if image.is_floating_point() else small.round().clamp(0, 255).to(torch.uint8)
