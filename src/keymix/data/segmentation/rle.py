# SPDX-License-Identifier: Apache-2.0
"""Masks as run lengths: ``start length`` pairs, starts from 1, rows one after the other.

The convention of the UW-Madison GI Tract competition at Kaggle: pixel 1 is the top left one, pixel
``width + 1`` the first of the second row. `encode` writes the one canonical text of a mask: its
runs in order, each as long as can be. So ``encode(decode(text))`` is ``text`` for canonical text,
and ``decode(encode(mask))`` is ``mask`` always.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from keymix.errors import UserError

Mask = NDArray[np.bool_]
Runs = NDArray[np.int64]
"""First pixels and ends (one past the last) of runs, ``[2, n]`` in order, from 0."""

NO_RUNS: Runs = np.zeros((2, 0), dtype=np.int64)
_LONGEST = 18  # digits that surely fit 64 bits
_NUMBERS = re.compile(r"[0-9]+(\s+[0-9]+)*", re.ASCII)


class RunsError(UserError):
    """Run lengths that are no mask.

    Args:
        kind: What is wrong, in a few words that are the same for all of the kind.
        message: The line that says it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def decode(text: str | float | None, height: int, width: int) -> Mask:
    """Make the mask of run lengths.

    Args:
        text: ``start length start length …``; nothing, or a NaN as a table reads it, is an empty
            mask. Runs may come in any order and may touch.
        height: Of the image, pixels.
        width: Of the image, pixels.

    Shape: text -> bool ``[height, width]``.

    Raises:
        RunsError: If the count is odd, a number is not whole or below 1, a run ends beyond the
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
    if text is None or text != text:  # noqa: PLR0124  # only NaN differs from itself
        return NO_RUNS
    words = str(text).strip()
    if not words or words.lower() == "nan":
        return NO_RUNS
    numbers = _numbers(words)
    starts, lengths = numbers[::2], numbers[1::2]
    for name, values in (("start", starts), ("length", lengths)):
        if values.min() < 1:
            k = int(np.argmax(values < 1))
            raise RunsError(
                "bad run lengths", f"{_run(k, starts, lengths)}: its {name} is below 1."
            )
    ends = starts + lengths - 1
    if ends.max() > height * width:
        k = int(np.argmax(ends > height * width))
        raise RunsError(
            "run beyond the image",
            f"{_run(k, starts, lengths)} ends beyond the image, which has {width}x{height} = "
            f"{height * width} pixels.",
        )
    order = np.argsort(starts, kind="stable")
    runs = np.stack([starts[order] - 1, ends[order]])
    over = runs[1, :-1] > runs[0, 1:]
    if over.any():
        k = int(np.argmax(over))
        one, two = sorted((int(order[k]), int(order[k + 1])))
        raise RunsError(
            "overlapping runs",
            f"{_run(two, starts, lengths)} overlaps {_run(one, starts, lengths)}.",
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


def _numbers(words: str) -> NDArray[np.int64]:
    if not _NUMBERS.fullmatch(words):
        bad = next(word for word in words.split() if not re.fullmatch("[0-9]+", word, re.ASCII))
        shown = bad if len(bad) <= 20 else f"{bad[:20]}…"
        raise RunsError("bad run lengths", f"{shown!r} is not a whole number of 1 or more.")
    parts = words.split()
    if len(parts) % 2:
        raise RunsError(
            "odd run lengths",
            f"{len(parts)} numbers, an odd count: starts and lengths come in pairs.",
        )
    longest = max(parts, key=len)
    if len(longest) > _LONGEST:
        raise RunsError("bad run lengths", f"a number has {len(longest)} digits.")
    return np.array(parts).astype(np.int64)


def _run(k: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> str:
    """Name run ``k``, counted from 1."""
    return f"run {k + 1} (start {starts[k]}, length {lengths[k]})"
