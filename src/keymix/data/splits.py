# SPDX-License-Identifier: Apache-2.0
"""Choice of rows, the same for ever: a function of labels or groups, number and seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keymix.data.streams import IntArray, Stream, hash64


def choose(
    labels: IntArray, number: int, *, seed: int, stream: Stream, leave_one: bool = False
) -> IntArray:
    """Choose rows so that every class has its share.

    Shares are proportional (largest remainders, ties by hash); where ``number`` allows, every class
    gets at least one row. Within a class the rows of the smallest hashes are taken.

    Returns the rows taken, ascending.
    """
    if len(labels) == 0:
        return np.zeros(0, dtype=np.int64)
    counts = np.bincount(labels)
    quota = _quotas(counts, number, counts - leave_one, hash64(seed, stream, -1, _arange(counts)))
    order = np.lexsort((hash64(seed, stream, _arange(labels)), labels))
    first = np.cumsum(counts) - counts
    rank = np.arange(len(labels)) - first[labels[order]]
    return np.sort(order[rank < quota[labels[order]]]).astype(np.int64)


def choose_groups(
    groups: Sequence[str], share: float, *, seed: int, stream: Stream, leave: int = 1
) -> IntArray:
    """Choose whole groups so that they hold about a share of the rows.

    Groups are gone through in the order of a hash of their names and the seed. One is taken if that
    brings the number of rows nearer to the one wanted; if none would, the smallest is.

    Returns the rows of the groups taken, ascending.
    """
    names, index, counts = np.unique(
        np.asarray(groups, dtype=object), return_inverse=True, return_counts=True
    )
    order = np.argsort(hash64(seed, stream, keys(names.tolist())), kind="stable")
    wanted = share * len(groups)
    taken = np.zeros(len(names), dtype=bool)
    have = 0
    for group in order.tolist():
        if int(taken.sum()) >= len(names) - leave:
            break
        count = int(counts[group])
        if abs(have + count - wanted) < abs(have - wanted):
            taken[group] = True
            have += count
    if not have:
        taken[order[np.argmin(counts[order])]] = True
    return np.flatnonzero(taken[index]).astype(np.int64)


def keys(names: Sequence[str]) -> IntArray:
    """Make a number of each name, the same for ever."""
    digests = [hashlib.sha256(name.encode()).digest()[:8] for name in names]
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def rest(count: int, taken: IntArray) -> IntArray:
    """List the rows of ``count`` that are not in ``taken``, ascending."""
    keep = np.ones(count, dtype=bool)
    keep[taken] = False
    return np.flatnonzero(keep).astype(np.int64)


def digest(origin: str, rows: IntArray) -> str:
    """Hash an index list: sha256 of the table's name and the row numbers, little-endian int64."""
    return hashlib.sha256(origin.encode() + b"\n" + rows.astype("<i8").tobytes()).hexdigest()


def _arange(like: IntArray) -> IntArray:
    return np.arange(len(like), dtype=np.int64)


def _quotas(counts: IntArray, number: int, caps: IntArray, ties: NDArray[np.uint64]) -> IntArray:
    caps = np.maximum(caps, 0)
    number = min(number, int(caps.sum()))
    exact = counts * (number / max(1, int(counts.sum())))
    quota: IntArray = np.minimum(np.floor(exact).astype(np.int64), caps)
    while (missing := number - int(quota.sum())) > 0:
        open_ = np.flatnonzero(quota < caps)
        by_need = open_[np.lexsort((ties[open_], quota[open_] - exact[open_]))]
        quota[by_need[:missing]] += 1
    if number >= np.count_nonzero(caps):  # a row for every class that can give one
        for poor in np.flatnonzero((quota == 0) & (caps > 0)):
            quota[np.argmax(np.where(quota > 1, quota - exact, -np.inf))] -= 1
            quota[poor] = 1
    return quota
