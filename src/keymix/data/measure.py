# SPDX-License-Identifier: Apache-2.0
"""Reads whole tables: pixels for sets held in memory, headers for the others, and their facts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from keymix.data.decode import Size, evaluation_array, reading
from keymix.data.sources.base import Table
from keymix.data.streams import IntArray, Stream, hash64

_T = TypeVar("_T")

STATISTICS_SAMPLE = 2000
_THREADS = 4
_CHUNK = 256  # images a task: threads pay for larger files, and cost little for small ones
_CHANNEL_CHUNK = 1 << 24  # pixels counted at once


def header_size(table: Table, i: int) -> Size:
    """Open image ``i``, check what its header can tell, and give height and width.

    Raises:
        UserError: If the image is damaged; it is named.
    """
    with reading(table.name(i)), table.open(i) as image:
        size = (image.height, image.width)
        image.verify()
    return size


def header_sizes(tables: Sequence[Table]) -> set[Size]:
    """Check the header of every image and give the sizes that occur."""
    sizes: set[Size] = set()
    for table in tables:

        def check(rows: range, table: Table = table) -> set[Size]:
            return {header_size(table, i) for i in rows}

        sizes.update(*_in_chunks(len(table), check))
    return sizes


def decode_all(
    table: Table, size: Size, in_chans: int, *, only_this_size: bool = False
) -> NDArray[np.uint8] | None:
    """Decode a table through the evaluation transform, uint8 ``[N, C, H, W]``.

    Args:
        table: The images.
        size: Height and width of the result.
        in_chans: Channels of the result.
        only_this_size: Give None if an image has another size of its own.

    Raises:
        UserError: If an image is damaged; it is named.
    """
    pixels = np.empty((len(table), in_chans, *size), dtype=np.uint8)

    def decode(rows: range) -> bool:
        for i in rows:
            with reading(table.name(i)), table.open(i) as image:
                if only_this_size and (image.height, image.width) != size:
                    return False
                pixels[i] = evaluation_array(image, size, in_chans, 1.0)
        return True

    return pixels if all(_in_chunks(len(table), decode)) else None


def sample(count: int) -> IntArray:
    """Choose up to 2,000 of ``count`` positions, always the same, ascending."""
    rows = np.arange(count, dtype=np.int64)
    order = np.argsort(hash64(0, Stream.STATISTICS, rows), kind="stable")
    return np.sort(order[:STATISTICS_SAMPLE]).astype(np.int64)


def mean_std(images: Sequence[NDArray[np.uint8]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and standard deviation of each channel, of values 0..1.

    Counted in integers, so the result does not depend on the order of the images.

    Shape: arrays of ``[N, C, H, W]`` -> C numbers each.
    """
    counts = np.zeros((images[0].shape[1], 256), dtype=np.int64)
    for part in images:
        step = max(1, _CHANNEL_CHUNK // (part.shape[2] * part.shape[3]))
        for start in range(0, len(part), step):
            for channel in range(part.shape[1]):
                plane = part[start : start + step, channel]
                counts[channel] += np.bincount(plane.ravel(), minlength=256)
    value = np.arange(256) / 255.0
    total = counts.sum(axis=1)
    mean = counts @ value / total
    variance = np.maximum(counts @ value**2 / total - mean**2, 0.0)
    std = np.maximum(np.sqrt(variance), 1 / 255)  # a flat channel must not divide by zero
    return tuple(mean.tolist()), tuple(std.tolist())


def fingerprint(
    tables: Mapping[str, Table], pixels: Mapping[str, NDArray[np.uint8] | None]
) -> tuple[str, str]:
    """Hash images and labels of all splits (sha256).

    Returns:
        The hash, and what of an image went into it.
    """
    whole = hashlib.sha256()
    what = "pixels and labels"
    for name, table in tables.items():
        held = pixels[name]
        whole.update(f"{name} {len(table)}\n".encode())
        whole.update(table.labels.astype("<i8").tobytes())
        if held is not None:
            whole.update(f"{held.shape}\n".encode())
            whole.update(held.data)
            continue
        what = "length and first 64 KiB of the encoded images, and labels"

        def digests(rows: range, table: Table = table) -> bytes:
            return b"".join(table.digest(i) for i in rows)

        for digest in _in_chunks(len(table), digests):
            whole.update(digest)
    return whole.hexdigest(), what


def _in_chunks(count: int, work: Callable[[range], _T]) -> list[_T]:
    """Run ``work`` on ranges that cover ``count``, in order of the ranges' results."""
    ranges = [range(start, min(count, start + _CHUNK)) for start in range(0, count, _CHUNK)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, ranges))
