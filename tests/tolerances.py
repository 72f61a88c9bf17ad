# SPDX-License-Identifier: Apache-2.0
"""How far a result may lie from its float64 reference: one number a dtype, with its reason.

Nothing widens them. A difference above them is an error to look into, not a number to change.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {
    # a sum of some hundred products of numbers near 1, in another order: 100 * 2^-53 = 1e-14; the
    # norm of a map multiplies that by up to eps^-0.5 = 316, and once more on the way back
    torch.float64: 1e-11,
    # the same hundred roundings at 2^-24
    torch.float32: 1e-5,
    # 8 bits of mantissa: every stored intermediate rounds by 2^-9, about ten of them in a row
    torch.bfloat16: 5e-2,
    # the same with 11 bits: three more, so an eighth
    torch.float16: 6.25e-3,
}

# what counts as a change: far above rounding in float64, far below any real effect
CHANGE = 1e-7

# share of spikes that may be others in bfloat16, whose rounding moves potentials near the
# threshold across it: about one spike in 75 is
FLIPPED = 0.03


def close(result: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
    """Hold ``result`` to ``wanted``, relative to the largest wanted number (at least 1)."""
    limit = TOLERANCE[dtype or result.dtype]
    assert result.shape == wanted.shape, f"{tuple(result.shape)} is not {tuple(wanted.shape)}"
    result, wanted = result.detach().double(), wanted.detach().double()
    assert torch.isfinite(result).all(), "the result is not finite"
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    error = float((result - wanted).abs().max()) / scale if wanted.numel() else 0.0
    assert error <= limit, f"off by {error:.3g}, allowed {limit:.3g}"


def differs(one: Tensor, other: Tensor) -> bool:
    """Whether two results differ by more than rounding; another shape is a difference."""
    if one.shape != other.shape:
        return True
    return bool((one.detach().double() - other.detach().double()).abs().gt(CHANGE).any())
