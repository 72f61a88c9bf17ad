# SPDX-License-Identifier: Apache-2.0
"""Decodes every image of a table once and keeps what a check needs: hash, size, kind, damage."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.decode import DAMAGE, SIXTEEN_BIT, TRANSPARENT, convert, reason
from keymix.data.files import threads
from keymix.data.sources.base import Faults, Source, Table
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.errors import UserError

Progress: TypeAlias = Callable[[int], None]

# What loading does with images that are not plain 8-bit colour; the bit is the place in this table.
TRAITS = {
    "animated": "the first frame is used",
    "turned": "the camera's orientation (EXIF) is not applied",
    "16-bit": "scaled to 8 bits",
    "grey": "repeated to three channels where the model takes colour",
    "CMYK": "converted to RGB",
    "palette": "converted to RGB",
    "transparent": "laid on white",
}
_BIT = {trait: 1 << place for place, trait in enumerate(TRAITS)}
HASH = 16  # bytes
_CHUNK = 32  # images a task
_ORIENTATION = 0x0112  # EXIF's tag


@dataclass(frozen=True)
class Remark:
    """Something odd about an input that can be used all the same."""

    what: str  # what, in words for many
    remedy: str
    told: str  # the same of this input


@dataclass(frozen=True, eq=False)
class Survey:
    """What was seen of a table's images."""

    # of the decoded pixels and their size, ``[N]`` of 16 bytes each; zero if broken
    hashes: NDArray[np.void]
    sizes: IntArray  # width and height in pixels, ``[N, 2]``; zero if broken
    traits: IntArray  # sets of `TRAITS` as bits, ``[N]``
    broken: dict[int, str]  # what is wrong with an image, by position
    # what else is odd about an input, by position
    remarks: dict[int, Remark] = field(default_factory=dict)
    # hashes of the targets, where they were read too; zero if broken
    targets: NDArray[np.void] | None = None
    # whether all pixels are the same, where that was looked at
    blank: NDArray[np.bool_] | None = None
    own: object = None  # what more was seen, for the findings of the targets

    def having(self, trait: str) -> IntArray:
        """List the positions of images with a trait."""
        return np.flatnonzero(self.traits & _BIT[trait]).astype(np.int64)


def survey_images(
    source: Source,
    tables: Mapping[str, Table],
    faults: Faults,
    options: Options,
    progress: Progress,
) -> dict[str, Survey]:
    """Decode every image of a source."""
    del faults, options
    return {name: survey(table, source.in_chans, progress) for name, table in tables.items()}


def survey(table: Table, in_chans: int, progress: Progress) -> Survey:
    """Decode every image of a table.

    Only what `Survey` holds stays in memory, besides the images of one stretch of the table.
    """
    count = len(table)
    hashes = np.zeros(count, dtype=f"V{HASH}")
    sizes = np.zeros((count, 2), dtype=np.int64)
    traits = np.zeros(count, dtype=np.int64)
    broken: dict[int, str] = {}

    with warnings.catch_warnings(), threads(min(16, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files that it reads all the same
        for stretch, part in table.parts():
            start = int(stretch[0])
            if isinstance(part, UserError):  # a file of many images
                broken.update(dict.fromkeys(stretch.tolist(), str(part)))
                progress(len(stretch))
                continue

            def look(rows: range, part: Table = part, start: int = start) -> dict[int, str]:
                found = {}
                for i in rows:
                    row = start + i
                    try:
                        with part.open(i) as image:
                            sizes[row] = image.size
                            traits[row] = _traits(image)
                            hashes[row] = np.void(_hash(convert(image, in_chans)))
                    except DAMAGE as error:
                        sizes[row] = traits[row] = 0
                        found[row] = reason(error)
                return found

            chunks = [range(at, min(len(part), at + _CHUNK)) for at in range(0, len(part), _CHUNK)]
            for rows, found in zip(chunks, pool.imap(look, chunks), strict=True):
                broken.update(found)
                progress(len(rows))
    return Survey(hashes, sizes, traits, broken)


def _hash(image: Image.Image) -> bytes:
    whole = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=HASH)
    whole.update(image.tobytes())
    return whole.digest()


def _traits(image: Image.Image) -> int:
    mode = image.mode
    deep = mode in SIXTEEN_BIT or any("16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    holds = {
        # a camera's MPO holds previews beside the photo
        "animated": image.format != "MPO" and _tells(lambda: getattr(image, "is_animated", False)),
        "turned": image.format in ("JPEG", "MPO", "TIFF", "WEBP")
        and _tells(lambda: image.getexif().get(_ORIENTATION, 1) not in (0, 1)),
        "16-bit": deep,
        "grey": mode in ("1", "L", "LA", *SIXTEEN_BIT),
        "CMYK": mode == "CMYK",
        "palette": mode in ("P", "PA"),
        "transparent": mode in TRANSPARENT or "transparency" in image.info,
    }
    return sum(_BIT[trait] for trait, held in holds.items() if held)


def _tells(question: Callable[[], bool]) -> bool:
    """Answer no where the file is too damaged to tell; decoding finds that out."""
    try:
        return question()
    except DAMAGE:
        return False
