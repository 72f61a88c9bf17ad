# SPDX-License-Identifier: Apache-2.0
"""Reads whole tables: pixels for sets held in memory, headers for the others, and their facts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keymix.data.decode import DAMAGE, Size, convert, evaluation_array, reading, reason
from keymix.data.files import in_chunks
from keymix.data.sources.base import Table
from keymix.data.streams import IntArray, Stream, hash64

STATISTICS_SAMPLE = 2000
LARGE = 100_000  # images: of a larger table, headers and contents are read of a sample only
REMEDY = (
    "Replace or remove it, or leave such images out with --data.skip_corrupt true; "
    "`keymix data check` names them all."
)


def header_size(table: Table, i: int) -> Size:
    """Open image ``i``, check what its header can tell, and give height and width."""
    if table.held is not None:
        return (table.held.shape[2], table.held.shape[3])
    with reading(table.name(i), REMEDY), table.open(i) as image:
        size = (image.height, image.width)
        image.verify()
    return size


def header_sizes(tables: Sequence[Table]) -> set[Size]:
    """Check the headers of images and give the sizes that occur.

    Of a table with more than 100,000 images a fixed sample of 2,000 is checked.
    """
    sizes: set[Size] = set()
    for table in tables:
        rows = sample(len(table)).tolist() if is_large(len(table)) else range(len(table))

        def check(some: range, table: Table = table, rows: Sequence[int] = rows) -> set[Size]:
            return {header_size(table, rows[k]) for k in some}

        if table.held is not None:
            sizes.add(header_size(table, 0))
            continue
        sizes.update(*in_chunks(len(rows), check))
    return sizes


def decode_all(
    table: Table,
    size: Size,
    in_chans: int,
    *,
    crop_pct: float = 1.0,
    only_this_size: bool = False,
) -> NDArray[np.uint8] | None:
    """Decode a table through the evaluation transform, uint8 ``[N, C, H, W]``."""
    if table.held is not None:
        return _fitted(table, table.held, size, in_chans, crop_pct)
    pixels = np.empty((len(table), in_chans, *size), dtype=np.uint8)

    def decode(rows: range) -> bool:
        for i in rows:
            with reading(table.name(i), REMEDY), table.open(i) as image:
                if only_this_size and (image.height, image.width) != size:
                    return False
                pixels[i] = evaluation_array(image, size, in_chans, crop_pct)
        return True

    return pixels if all(in_chunks(len(table), decode)) else None


def _fitted(
    table: Table, held: NDArray[np.uint8], size: Size, in_chans: int, crop_pct: float
) -> NDArray[np.uint8]:
    """Resize pixels where they have another size, and repeat grey ones to ``in_chans``."""
    count, channels = held.shape[:2]
    if held.shape[2:] != size or crop_pct < 1.0:
        resized = np.empty((count, channels, *size), dtype=np.uint8)

        def resize(rows: range) -> None:
            for i in rows:
                resized[i] = evaluation_array(table.open(i), size, channels, crop_pct)

        in_chunks(count, resize)
        held = resized
    return held if channels == in_chans else np.repeat(held, in_chans, axis=1)


def broken(table: Table, in_chans: int) -> dict[int, str]:
    """Decode every image once and say what is wrong with those that cannot be used.

    JPEG files are decoded at an eighth of their size: all their data is read, but fewer pixels are
    made of it.

    Returns the reason by position, in ascending order.
    """

    def find(rows: range) -> dict[int, str]:
        found = {}
        for i in rows:
            try:
                with table.open(i) as image:
                    if image.format == "JPEG":
                        image.draft(image.mode, (1, 1))
                    convert(image, in_chans)
            except DAMAGE as error:
                found[i] = reason(error)
        return found

    if table.held is not None:
        return {}
    return {i: why for part in in_chunks(len(table), find) for i, why in part.items()}


def is_large(count: int) -> bool:
    """Whether headers and contents of so many images are read of a sample only."""
    return count > LARGE


def sample(count: int) -> IntArray:
    """Choose up to 2,000 of ``count`` positions, always the same, ascending."""
    rows = np.arange(count, dtype=np.int64)
    order = np.argsort(hash64(0, Stream.STATISTICS, rows), kind="stable")
    return np.sort(order[:STATISTICS_SAMPLE]).astype(np.int64)
