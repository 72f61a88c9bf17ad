# SPDX-License-Identifier: Apache-2.0
"""What is seen of single samples: by loading, before anything is trained, and by a check."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
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


@dataclass(kw_only=True)
class Seen:
    """What was seen of a sample."""

    faults: Sequence[Fault] = ()
    size: Size | None = None  # height and width of the image, pixels; None where it is broken
    target: bytes | None = None  # hash of the target where it has a place in the image
    own: Any = None  # what its kind of target keeps of it (`TargetKind.seen`)
    hash: bytes = bytes(HASH)  # of the decoded image and its size; zero where it was not decoded
    brightest: int = 0  # largest 16-bit value; 0 of other images
    # what is odd about a sample that can be used: kinds of `keymix.data.findings.KINDS` and words
    remarks: dict[str, str] = field(default_factory=dict)


def look(rows: Sequence[Row], kind: TargetKind, *, decode: bool) -> list[Seen]:
    """Look at all samples of a split, in threads."""

    def some_of(chunk: range) -> list[Seen]:
        return [_look_at(rows[i], kind, decode=decode) for i in chunk]

    return [seen for part in in_chunks(len(rows), some_of) for seen in part]


def _look_at(row: Row, kind: TargetKind, *, decode: bool) -> Seen:
    faults = list(row.faults)
    seen = Seen(faults=faults)
    with _collected(faults, f"image {row.id}", row.id):
        seen.size = size_of(row.image, decode=decode)
    _look_at_target(row, kind, seen, faults)
    return seen


def look_whole(row: Row, kind: TargetKind, inputs: InputKind, in_chans: int) -> Seen:
    """Decode a sample, and find all that is wrong with it or odd about it."""
    faults = list(row.faults)
    seen = Seen(faults=faults)
    with _collected(faults, f"image {row.id}", row.id):
        if isinstance(row.image, Encoded):
            with row.image.open() as image:
                remarks = _remarks(image, in_chans)
                if image.mode in SIXTEEN_BIT:
                    seen.brightest = int(np.asarray(image).max())
                pixels = pixels_of(image)
        else:
            remarks, pixels = {}, row.image()
        seen.size = pixels.shape[-2], pixels.shape[-1]
        if inputs is RECORDING:
            empty = int((pixels.flatten(1).sum(1) == 0).sum())
            if empty:
                remarks["empty frames"] = f"{empty} of {len(pixels)} frames"
        else:
            pixels = picture(in_channels(pixels, in_chans), inputs)
            if blank(pixels):
                remarks["blank"] = ""
        seen.remarks = remarks
        seen.hash = hash_of(pixels)
    _look_at_target(row, kind, seen, faults)
    return seen


def _look_at_target(row: Row, kind: TargetKind, seen: Seen, faults: list[Fault]) -> None:
    """Read a target that has a place in its image, and compare their sizes."""
    if not kind.placed:
        return
    with _collected(faults, f"the target of {row.id}", row.id):
        target = row.read_target()
        stated = _stated(target)
        size = seen.size
        if size is not None and stated not in (None, size):
            what = "its entry states" if isinstance(target, Instances) else "its mask has"
            shown = f"{row.id} has {size[1]}x{size[0]} pixels, and {what}"
            faults.append(Fault("wrong size", f"{shown} {stated[1]}x{stated[0]}", row.id))
        seen.own = look_up(kind.seen)(target) if kind.seen else None
        seen.target = hashlib.sha256(target_bytes(target)).digest()


def _remarks(image: Image.Image, in_chans: int) -> dict[str, str]:
    """Say what is odd about an opened image, for data of one channel or three."""
    mode = image.mode
    found = {
        # a camera's MPO holds previews next to the photo
        "animated": image.format != "MPO" and _yes(lambda: getattr(image, "is_animated", False)),
        "turned": orientation(image) != 1,
    }
    converted = {
        "16-bit": mode in SIXTEEN_BIT
        or any("16" in str(tile[3]) for tile in getattr(image, "tile", ())),
        "grey": in_chans == 3 and mode in ("1", "L", "LA", *SIXTEEN_BIT),
        "CMYK": mode == "CMYK",
        "palette": mode in ("P", "PA"),
        "transparent": mode in TRANSPARENT or "transparency" in image.info,
    }
    remarks = {kind: "" for kind, there in found.items() if there}
    if any(converted.values()):
        remarks["converted"] = ", ".join(name for name, is_so in converted.items() if is_so)
    return remarks


def _yes(question: Callable[[], bool]) -> bool:
    """Return no where the file is too damaged to say; decoding finds that out."""
    try:
        return question()
    except DAMAGE:
        return False


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
def _collected(faults: list[Fault], what: str, culprit: str) -> Iterator[None]:
    """Collect what reading a part of a sample finds wrong."""
    try:
        yield
    except BadSampleError as error:
        faults += error.faults
    except UserError as error:
        faults.append(Fault("unreadable", str(error).replace(REMEDY, "").strip(), culprit))
    except DAMAGE as error:
        faults.append(Fault("unreadable", f"cannot read {what}: {reason(error)}", culprit))


def _stated(target: Any) -> Size | None:
    """Return height and width of the image that a target is of, where it says so."""
    if isinstance(target, Instances):
        return target.size
    if isinstance(target, tv_tensors.Mask):
        return target.shape[-2], target.shape[-1]
    return None


def target_bytes(target: Any) -> bytes:
    """Return bytes that identify a target."""
    if isinstance(target, Instances):
        return target.content()
    if isinstance(target, dict):
        return b"".join(name.encode() + target_bytes(each) for name, each in target.items())
    if not isinstance(target, Tensor):
        return str(target).encode()
    return f"{tuple(target.shape)}".encode() + target.as_subclass(Tensor).numpy().tobytes()
