# SPDX-License-Identifier: Apache-2.0
"""Decodes every image of a table once and keeps what a check needs: hash, size, kind, damage."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import TypeAlias

import numpy as np
from PIL import Image

from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    TRANSPARENT,
    convert,
    orientation,
    reason,
    upright_size,
)
from keymix.data.files import ranges, threads
from keymix.data.sources.base import Faults, Source, Table
from keymix.data.specs import Options
from keymix.errors import UserError

Progress: TypeAlias = Callable[[int], None]

# What loading does with images that are not plain 8-bit colour; the bit is the place in this table.
TRAITS = {
    "animated": "the first frame is used",
    "turned": "they are shown upright, as the camera's orientation (EXIF) says",
    "16-bit": "scaled to 8 bits",
    "grey": "repeated to three channels where the model takes colour",
    "CMYK": "converted to RGB",
    "palette": "converted to RGB",
    "transparent": "drawn on white",
}
_BIT = {trait: 1 << place for place, trait in enumerate(TRAITS)}
HASH = 16  # bytes
_CHUNK = 32  # images per task


@dataclass(frozen=True)
class Remark:
    """Something odd about an input that can be used all the same."""

    what: str  # what, in words for many
    remedy: str
    reason: str  # the same of this input


class Survey:
    """What was seen of the inputs of a table, by position; zero where one is broken.

    Targets are hashed where they were read too; ``own`` is what more was seen, for the findings of
    the targets.
    """

    def __init__(self, count: int, *, targets: bool = False, own: object = None) -> None:
        self.hashes = np.zeros(count, dtype=f"V{HASH}")  # of decoded inputs and their size
        self.sizes = np.zeros((count, 2), dtype=np.int64)  # width and height, pixels
        self.traits = np.zeros(count, dtype=np.int64)  # sets of `TRAITS` as bits
        self.brightest = np.zeros(count, dtype=np.int64)  # largest 16-bit value; 0 of others
        self.blank = np.zeros(count, dtype=np.bool_)  # whether all pixels are the same
        self.targets = np.zeros(count, dtype=f"V{HASH}") if targets else None
        self.broken: dict[int, str] = {}
        self.remarks: dict[int, Remark] = {}
        self.own = own


def hash_of(content: bytes, head: str = "") -> np.void:
    """Hash what makes inputs or targets equal."""
    whole = hashlib.blake2b(head.encode(), digest_size=HASH)
    whole.update(content)
    return np.void(whole.digest())


@contextmanager
def looking() -> Iterator[ThreadPool]:
    """Give threads that decode images; Pillow's remarks on odd files that it reads are dropped."""
    with warnings.catch_warnings(), threads(min(16, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        yield pool


def survey_images(
    source: Source, faults: Faults, options: Options, progress: Progress
) -> dict[str, Survey]:
    """Decode every image of a source."""
    del faults, options
    return {name: survey(table, source.in_chans, progress) for name, table in source.tables.items()}


def survey(table: Table, in_chans: int, progress: Progress) -> Survey:
    """Decode every image of a table.

    Only what `Survey` holds stays in memory, and the images of one stretch of the table.
    """
    seen = Survey(len(table))
    with looking() as pool:
        for stretch, part in table.parts():
            start = int(stretch[0])
            if isinstance(part, UserError):  # a file of many images
                seen.broken.update(dict.fromkeys(stretch.tolist(), str(part)))
                progress(len(stretch))
                continue

            def look(rows: range, part: Table = part, start: int = start) -> dict[int, str]:
                found = {}
                for i in rows:
                    row = start + i
                    try:
                        with part.open(i) as image:
                            seen.sizes[row] = upright_size(image)[::-1]
                            seen.traits[row] = _traits(image)
                            if image.mode in SIXTEEN_BIT:
                                seen.brightest[row] = np.asarray(image).max()
                            decoded = convert(image, in_chans)
                            head = f"{decoded.mode} {decoded.size}"
                            seen.hashes[row] = hash_of(decoded.tobytes(), head)
                    except DAMAGE as error:
                        seen.sizes[row] = seen.traits[row] = 0
                        found[row] = reason(error)
                return found

            chunks = ranges(len(part), _CHUNK)
            for rows, found in zip(chunks, pool.imap(look, chunks), strict=True):
                seen.broken.update(found)
                progress(len(rows))
    return seen


def _traits(image: Image.Image) -> int:
    mode = image.mode
    deep = mode in SIXTEEN_BIT or any("16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    holds = {
        # a camera's MPO holds previews next to the photo
        "animated": image.format != "MPO" and _yes(lambda: getattr(image, "is_animated", False)),
        "turned": orientation(image) != 1,
        "16-bit": deep,
        "grey": mode in ("1", "L", "LA", *SIXTEEN_BIT),
        "CMYK": mode == "CMYK",
        "palette": mode in ("P", "PA"),
        "transparent": mode in TRANSPARENT or "transparency" in image.info,
    }
    return sum(_BIT[trait] for trait, has in holds.items() if has)


def _yes(question: Callable[[], bool]) -> bool:
    """Return no where the file is too damaged to say; decoding finds that out."""
    try:
        return question()
    except DAMAGE:
        return False
