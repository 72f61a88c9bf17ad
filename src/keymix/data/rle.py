# SPDX-License-Identifier: Apache-2.0
"""Masks as run lengths: ``start length`` pairs, starts from 1, rows one after the other.

The convention of the UW-Madison GI Tract competition at Kaggle: pixel 1 is the top left one, pixel
``width + 1`` the first of the second row. `encode` writes the one canonical text of a mask: its
runs in order, each as long as can be. So ``encode(decode(text))`` is ``text`` for canonical text,
and ``decode(encode(mask))`` is ``mask`` always.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Runs = NDArray[np.int64]
"""First pixels and ends (one past the last) of runs, ``[2, n]`` in order, from 0."""


def decode(text: str | float | None, height: int, width: int) -> Mask:
    """Make the mask of run lengths.

    Args:
        text: ``start length start length …``; nothing, or a NaN as a table reads it, is an empty
            mask. Runs may come in any order and may touch.
        height: Of the image, pixels.
        width: Of the image, pixels.

    Shape: text -> bool ``[height, width]``.

    Raises:
        ValueError: If the count is odd, a number is not whole or below 1, a run ends beyond the
            image, or two overlap.
    """
    return filled(parse(text, height, width), height, width)


def encode(mask: NDArray[np.generic]) -> str:
    """Write the canonical run lengths of a mask; nothing for an empty one.

    Args:
        mask: What is not 0 belongs to it.

    Shape: ``[height, width]`` -> text.
    """
    if mask.ndim != 2:
        raise ValueError(f"{mask.shape=} is not that of one mask, height and width")
    flat = np.zeros(mask.size + 2, dtype=np.int8)
    flat[1:-1] = (mask != 0).ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    edges[1::2] -= edges[::2]
    return " ".join(map(str, edges.tolist()))


def parse(text: str | float | None, height: int, width: int) -> Runs:
    """Read and check run lengths without making the mask.

    Returns first pixels and ends of the runs, in order, counted from 0.
    """
    words = [] if text is None or str(text).strip().lower() == "nan" else str(text).split()
    if not words:
        return np.zeros((2, 0), dtype=np.int64)
    if len(words) % 2:
        raise ValueError(f"{len(words)} numbers, an odd count: starts and lengths come in pairs")
    numbers = np.array(words).astype(np.int64)
    starts, lengths = numbers[::2], numbers[1::2]
    order = np.argsort(starts, kind="stable")
    runs = np.stack([starts - 1, starts - 1 + lengths])[:, order]
    if (
        min(starts.min(), lengths.min()) < 1
        or runs[1].max() > height * width
        or (runs[1, :-1] > runs[0, 1:]).any()
    ):
        raise ValueError(
            f"runs below 1, that overlap, or end beyond the image of {width}x{height} = "
            f"{height * width} pixels"
        )
    return runs


def filled(runs: Runs, height: int, width: int) -> Mask:
    """Make the mask of runs that `parse` gave.

    Shape: ``[2, n]`` -> bool ``[height, width]``.
    """
    steps = np.zeros(height * width + 1, dtype=np.int8)
    steps[runs[0]] += 1
    steps[runs[1]] -= 1  # a run that touches the next one cancels its start
    return np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_).reshape(height, width)


def overlap(masks: Sequence[Runs]) -> int:
    """Count the pixels that several masks of an image have."""
    edges = np.concatenate([runs.ravel() for runs in masks])
    steps = np.concatenate([np.repeat([1, -1], runs.shape[1]) for runs in masks])
    order = np.argsort(edges)
    depth = np.cumsum(steps[order])[:-1]
    return int(np.diff(edges[order])[depth > 1].sum())
