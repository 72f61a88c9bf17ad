# SPDX-License-Identifier: Apache-2.0
"""Random numbers as a function of counters: (seed, epoch, sample index) -> number, no state.

The mixing step is SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). Integer arithmetic only, so a number is the same on every machine
and with every version of NumPy. `keymix.data.tensor_streams` draws the same numbers on a device.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
Key: TypeAlias = int | IntArray

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHAIN = np.uint64(0xD1B54A32D192ED03)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(s) for s in (27, 30, 31, 11))


class Stream(IntEnum):
    """What a number is for: different purposes never share numbers. Values are fixed for good."""

    TEST = 1
    LIMIT = 2
    VALIDATION = 3
    PLACE = 4
    STATISTICS = 5
    ORDER = 6
    CROP = 7
    FLIP = 8
    RAND_AUGMENT = 9
    ERASING = 10
    MIXING = 11
    NOISE = 12
    FRAMES = 13
    SACCADES = 14
    SCANS = 15


def hash64(*keys: Key) -> NDArray[np.uint64]:
    """Hash integer keys, broadcast against each other, to 64 bits.

    Shape: keys broadcast to ``[*]`` -> ``[*]`` (``[1]`` when all are plain integers).
    """
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        if isinstance(key, int):
            word = np.array([key & _MASK], dtype=np.uint64)
        else:
            word = np.atleast_1d(np.asarray(key, dtype=np.int64)).view(np.uint64)
        state = _mix(state * _CHAIN + _mix(word + _GOLDEN))
    return state


def uniforms(count: int, *keys: Key) -> NDArray[np.float64]:
    """Draw ``count`` numbers in [0, 1) for each key, each a multiple of 2^-53.

    Shape: keys broadcast to ``[n]`` -> ``[n, count]``.
    """
    base = hash64(*keys)[:, None]
    draw = np.arange(count, dtype=np.uint64)[None, :]
    bits = _mix(base * _CHAIN + _mix(draw + _GOLDEN))
    return (bits >> _S11).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)
