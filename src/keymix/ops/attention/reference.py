# SPDX-License-Identifier: Apache-2.0
"""Attention over keys from any source, in plain PyTorch: the specification and the fallback."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def attention(
    q: Float[Tensor, "*batch h N d"],
    k: Float[Tensor, "*keys h M d"],
    v: Float[Tensor, "*batch h M e"],
    *,
    scale: float | Tensor,
    bias: Tensor | None = None,
) -> Float[Tensor, "*batch h N e"]:
    r"""Compute :math:`\mathrm{softmax}(s\,Q K^\top + b)\,V`, head by head.

    The one formula of all four papers; they differ in what stands for Q and K: SKA (Sec. 4.1)
    puts a learned tensor for K, KV attention (Eq. 2) puts K for Q. Leading axes of keys may be
    missing or 1 and broadcast (a static key has none); b broadcasts to ``[*, h, N, M]``.
    """
    logits = (q @ k.transpose(-2, -1)) * scale
    if bias is not None:
        logits = logits + bias
    return logits.softmax(-1) @ v
