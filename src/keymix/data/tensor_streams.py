# SPDX-License-Identifier: Apache-2.0
"""The numbers of `keymix.data.streams`, drawn on the device that the sample indices are on.

SplitMix64 is defined on unsigned 64-bit words and PyTorch computes with signed ones. Sums, products
and exclusive or give the same bits in both; a right shift needs the copies of the sign masked away.
Plain integers are hashed on the host: nothing travels to the device, and nothing back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keymix.data.streams import hash64

_GOLDEN = 0x9E3779B97F4A7C15
_CHAIN = 0xD1B54A32D192ED03
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniforms(count: int, *keys: int, index: Tensor) -> Tensor:
    """Draw what ``streams.uniforms(count, *keys, index)`` draws, bit for bit.

    Shape: index ``[n]`` -> float64 ``[n, count]`` in [0, 1), on the device of ``index``.
    """
    prefix = int(hash64(*keys)[0]) if keys else 0
    state = _mix(_mix(index + _signed(_GOLDEN)) + _signed(prefix * _CHAIN))[:, None]
    draw = torch.arange(count, device=index.device)[None, :]
    bits = _mix(state * _signed(_CHAIN) + _mix(draw + _signed(_GOLDEN)))
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_M1)
    x = (x ^ _shifted(x, 27)) * _signed(_M2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; PyTorch's own shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Read the low 64 bits as a signed number."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
