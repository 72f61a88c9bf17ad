# SPDX-License-Identifier: Apache-2.0
"""Reads every image with its mask once and keeps what a check needs; goes on after a fault."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keymix.data.files import threads
from keymix.data.kinds import IGNORE
from keymix.data.segmentation.table import Pixels, ScanTable, Seen
from keymix.data.sources.base import Fault, Faults, Source, Table
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.data.survey import HASH, Progress, Survey
from keymix.errors import UserError

_CHUNK = 16  # images a task


@dataclass(frozen=True, eq=False)
class ScanSurvey:
    """What was seen of a table's images and masks."""

    # of the decoded pixels and their size, ``[N]`` of 16 bytes each; zero if broken
    hashes: NDArray[np.void]
    mask_hashes: NDArray[np.void]  # of the masks, likewise
    sizes: IntArray  # width and height in pixels, ``[N, 2]``; zero if broken
    pixels: IntArray  # pixels of each class, ``[N, K]``; zero where the mask is broken
    ignored: IntArray  # pixels of the value 255, in any plane, ``[N]``
    area: IntArray  # pixels of the masks, ``[N]``; zero where broken
    blank: NDArray[np.bool_]  # whether all pixels of an image are the same, ``[N]``
    seen: list[Seen]  # what each table says of its images, ``N`` of them
    # what makes an image or a mask unreadable, by position
    broken: dict[int, list[Fault]] = field(default_factory=dict)


def survey_source(
    source: Source,
    tables: Mapping[str, Table],
    faults: Faults,
    options: Options,
    progress: Progress,
) -> dict[str, Survey]:
    """Read every image and mask of a source."""
    scans = {name: table for name, table in tables.items() if isinstance(table, ScanTable)}
    found = {
        name: survey_scans(table, len(source.classes), progress, stack=options.stack)
        for name, table in scans.items()
    }
    told = set()
    for each in found.values():
        for fault in (fault for k in sorted(each.broken) for fault in each.broken[k]):
            if (fault.kind, fault.message) not in told:
                told.add((fault.kind, fault.message))
                faults.found.append(fault)
    return {
        name: Survey(
            each.hashes,
            each.sizes,
            np.zeros(len(each.seen), dtype=np.int64),
            {},
            targets=each.mask_hashes,
            blank=each.blank,
            own=each,
        )
        for name, each in found.items()
    }


def survey_scans(
    table: ScanTable, classes: int, progress: Progress, *, stack: int | None = None
) -> ScanSurvey:
    """Read every image and mask of a table."""
    count = len(table)
    found = ScanSurvey(
        hashes=np.zeros(count, dtype=f"V{HASH}"),
        mask_hashes=np.zeros(count, dtype=f"V{HASH}"),
        sizes=np.zeros((count, 2), dtype=np.int64),
        pixels=np.zeros((count, classes), dtype=np.int64),
        ignored=np.zeros(count, dtype=np.int64),
        area=np.zeros(count, dtype=np.int64),
        blank=np.zeros(count, dtype=np.bool_),
        seen=[Seen()] * count,
    )

    def look(rows: range) -> int:
        for i in rows:
            found.seen[i] = table.inspect(i)
            faults = list(found.seen[i].faults)
            try:
                _see_image(found, i, table.pixels(i), stack)
                _see_mask(found, i, table.mask(i))
            except UserError as error:
                if not faults:  # else it was told by its kind
                    faults.append(Fault("unreadable image", str(error), table.name(i)))
            if faults:
                found.broken[i] = faults
        return len(rows)

    with warnings.catch_warnings(), threads(min(16, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files that it reads all the same
        chunks = [range(at, min(count, at + _CHUNK)) for at in range(0, count, _CHUNK)]
        for done in pool.imap(look, chunks):
            progress(done)
    return found


def joined(surveys: Sequence[ScanSurvey]) -> ScanSurvey:
    """Make one survey of those of several tables, in their order."""
    starts = np.cumsum([0, *(len(each.seen) for each in surveys)]).tolist()
    return ScanSurvey(
        **{
            name: np.concatenate([getattr(each, name) for each in surveys])
            for name in ("hashes", "mask_hashes", "sizes", "pixels", "ignored", "area", "blank")
        },
        seen=[seen for each in surveys for seen in each.seen],
        broken={
            start + i: found
            for start, each in zip(starts, surveys, strict=False)
            for i, found in each.broken.items()
        },
    )


def _see_image(found: ScanSurvey, i: int, pixels: Pixels, stack: int | None) -> None:
    if stack is not None:
        pixels = pixels[len(pixels) // 2][None]
    found.sizes[i] = pixels.shape[:0:-1]
    found.hashes[i] = np.void(_hash(pixels))
    found.blank[i] = pixels.min() == pixels.max()


def _see_mask(found: ScanSurvey, i: int, mask: Pixels) -> None:
    classes = found.pixels.shape[1]
    if mask.ndim == 2:
        counts = np.bincount(mask.ravel(), minlength=IGNORE + 1)
        found.pixels[i], found.ignored[i] = counts[:classes], counts[IGNORE]
    else:
        found.pixels[i] = (mask == 1).sum(axis=(1, 2))
        found.ignored[i] = (mask == IGNORE).any(axis=0).sum()
    found.area[i] = mask.shape[-2] * mask.shape[-1]
    found.mask_hashes[i] = np.void(_hash(mask))


def _hash(array: Pixels) -> bytes:
    whole = hashlib.blake2b(f"{array.shape}".encode(), digest_size=HASH)
    whole.update(array.tobytes())
    return whole.digest()
