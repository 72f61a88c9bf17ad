# SPDX-License-Identifier: Apache-2.0
"""What is seen of single samples: by loading, before anything is trained, and by a check."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors

from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    TRANSPARENT,
    Encoded,
    in_channels,
    orientation,
    pixels_of,
    reason,
)
from keymix.data.files import in_chunks
from keymix.data.instances import Instances
from keymix.data.kinds import RECORDING, InputKind, TargetKind
from keymix.data.pixels import picture
from keymix.data.sample import REMEDY, BadSampleError, Fault, Row, Size, size_of
from keymix.data.specs import look_up
from keymix.errors import UserError

HASH = 16  # bytes
ONE_COLOUR = "of one colour"


@dataclass(kw_only=True)
class Seen:
    """What was seen of a sample."""

    faults: list[Fault] = field(default_factory=list)
    size: Size | None = None  # height and width of the image, pixels; None where it is broken
    target: bytes | None = None  # hash of the target where it has a place in the image
    own: Any = None  # what its kind of target keeps of it (`TargetKind.seen`)
    hash: bytes = bytes(HASH)  # of the decoded image and its size; zero where it was not decoded
    brightest: int = 0  # largest 16-bit value; 0 of other images
    odd: list[str] = field(default_factory=list)  # what is odd about a sample that can be used
    converted: str = ""  # from what it is converted


def look(rows: Sequence[Row], kind: TargetKind, *, decode: bool) -> list[Seen]:
    """Look at all samples of a split, in threads."""

    def some_of(chunk: range) -> list[Seen]:
        found = []
        for i in chunk:
            row = rows[i]
            seen = Seen(faults=[*row.faults])
            with _collected(seen, row, "image"):
                seen.size = size_of(row.image, decode=decode)
            _look_at_target(row, kind, seen)
            found.append(seen)
        return found

    return [seen for part in in_chunks(len(rows), some_of) for seen in part]


def look_whole(row: Row, kind: TargetKind, inputs: InputKind, in_chans: int) -> Seen:
    """Decode a sample, and find all that is wrong with it or odd about it."""
    seen = Seen(faults=[*row.faults])
    with _collected(seen, row, "image"):
        if isinstance(row.image, Encoded):
            with row.image.open() as image:
                seen.converted = _converted(image, in_chans)
                # a camera's MPO holds previews next to the photo
                if image.format != "MPO" and getattr(image, "is_animated", False):
                    seen.odd.append("animated: the first frame is used")
                if image.mode in SIXTEEN_BIT:
                    seen.brightest = int(np.asarray(image).max())
                pixels = pixels_of(image)
        else:
            pixels = row.image()
        seen.size = pixels.shape[-2], pixels.shape[-1]
        if inputs is RECORDING:
            empty = int((pixels.flatten(1).sum(1) == 0).sum())
            if empty:
                seen.odd.append(f"{empty} of {len(pixels)} frames are empty")
        else:
            pixels = picture(in_channels(pixels, in_chans), inputs)
            if blank(pixels):
                seen.odd.append(ONE_COLOUR)
        seen.hash = hash_of(pixels)
    _look_at_target(row, kind, seen)
    return seen


def _look_at_target(row: Row, kind: TargetKind, seen: Seen) -> None:
    """Read a target that has a place in its image, and compare their sizes."""
    if not kind.placed:
        return
    with _collected(seen, row, "the target of"):
        target, size = row.read_target(), seen.size
        stated = target.size if isinstance(target, Instances) else None
        if isinstance(target, tv_tensors.Mask):
            stated = target.shape[-2], target.shape[-1]
        if size is not None and stated not in (None, size):
            what = "its entry states" if isinstance(target, Instances) else "its mask has"
            shown = f"{row.id} has {size[1]}x{size[0]} pixels, and {what}"
            seen.faults.append(Fault(row.id, f"{shown} {stated[1]}x{stated[0]}"))
        seen.own = look_up(kind.seen)(target) if kind.seen else None
        seen.target = hashlib.sha256(target_bytes(target)).digest()


def _converted(image: Image.Image, in_chans: int) -> str:
    """Say what is not plain about an opened image, for data of one channel or three."""
    mode = image.mode
    found = {
        "turned": orientation(image) != 1,
        "16-bit": mode in SIXTEEN_BIT
        or any("16" in str(tile[3]) for tile in getattr(image, "tile", ())),
        "grey": in_chans == 3 and mode in ("1", "L", "LA", *SIXTEEN_BIT),
        "CMYK": mode == "CMYK",
        "palette": mode in ("P", "PA"),
        "transparent": mode in TRANSPARENT or "transparency" in image.info,
    }
    return ", ".join(name for name, there in found.items() if there)


def blank(pixels: Tensor) -> bool:
    """Return whether all pixels of an image are the same, ``[C, H, W]``."""
    flat = pixels.flatten(1)
    return bool((flat == flat[:, :1]).all())


def hash_of(content: Tensor | bytes) -> bytes:
    """Hash what makes inputs equal: pixels with their shape, or bytes that identify them."""
    whole = hashlib.blake2b(digest_size=HASH)
    if isinstance(content, Tensor):
        whole.update(f"{tuple(content.shape)}".encode())
        content = content.contiguous().numpy().tobytes()
    whole.update(content)
    return whole.digest()


@contextmanager
def _collected(seen: Seen, row: Row, what: str) -> Iterator[None]:
    """Collect what reading a part of a sample finds wrong."""
    try:
        yield
    except BadSampleError as error:
        seen.faults += error.faults
    except UserError as error:
        seen.faults.append(Fault(row.id, str(error).replace(REMEDY, "").strip()))
    except DAMAGE as error:
        seen.faults.append(Fault(row.id, f"cannot read {what} {row.id}: {reason(error)}"))


def target_bytes(target: Any) -> bytes:
    """Return bytes that identify a target."""
    if isinstance(target, Instances):
        return target.content()
    if isinstance(target, dict):
        return b"".join(name.encode() + target_bytes(each) for name, each in target.items())
    if not isinstance(target, Tensor):
        return str(target).encode()
    return f"{tuple(target.shape)}".encode() + target.as_subclass(Tensor).numpy().tobytes()
