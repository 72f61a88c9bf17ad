# SPDX-License-Identifier: Apache-2.0
"""Random numbers as a function of counters: (seed, epoch, sample index) -> number, no state.

The mixing step is SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). Integer arithmetic only, so a number is the same on every machine
and with every version of NumPy.

`device_uniforms` draws the same numbers on the device that the sample indices are on. SplitMix64 is
defined on unsigned 64-bit words and PyTorch computes with signed ones: sums, products and exclusive
or give the same bits in both, and a right shift needs the copies of the sign masked away. Plain
integers are hashed on the host: nothing travels to the device, and nothing back.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    SCALE = 16
    SHARDS = 17


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


def device_uniforms(count: int, *keys: int, index: Tensor) -> Tensor:
    """Draw what ``uniforms(count, *keys, index)`` draws, bit for bit.

    Shape: index ``[n]`` -> float64 ``[n, count]`` in [0, 1), on the device of ``index``.
    """
    prefix = int(hash64(*keys)[0]) if keys else 0
    state = _mix_signed(_mix_signed(index + _signed(int(_GOLDEN))) + _signed(prefix * int(_CHAIN)))[
        :, None
    ]
    draw = torch.arange(count, device=index.device)[None, :]
    bits = _mix_signed(state * _signed(int(_CHAIN)) + _mix_signed(draw + _signed(int(_GOLDEN))))
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def _mix_signed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(int(_M1))
    x = (x ^ _shifted(x, 27)) * _signed(int(_M2))
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; PyTorch's own shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Read the low 64 bits as a signed number."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
