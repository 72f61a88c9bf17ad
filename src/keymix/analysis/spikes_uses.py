# SPDX-License-Identifier: Apache-2.0
"""How often each input of a product or a convolution is used: its synapses, borders exact."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def conv_uses(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> tuple[float, float]:
    """Count the weights that inputs which are not 0 meet, and the same weighed by their values.

    An input at the border meets fewer weights than one in the middle: padding meets none.

    Args:
        x: Input ``[B, C, *size]``.
        weight: Weights as PyTorch lays them.
        out: Result ``[B, D, *size]``.
        stride: One an axis, or one for all.
        padding: Likewise.
        dilation: Likewise.
        transposed: Whether it is a transposed convolution.
        groups: Groups of channels.

    Returns:
        Uses of inputs that are not 0, and uses times values.
    """
    sizes, kernel = x.shape[2:], weight.shape[2:]
    across = weight.shape[1] if transposed else weight.shape[0] // groups
    spots = torch.ones((), dtype=torch.float64, device=x.device)
    for axis in range(len(sizes)):
        met = _met(
            sizes[axis],
            out.shape[2 + axis],
            kernel[axis],
            *(each[axis if len(each) > 1 else 0] for each in (stride, padding, dilation)),
            transposed=transposed,
        )
        spots = spots[..., None] * met.to(spots)
    nonzero = torch.count_nonzero(x, dim=(0, 1)).to(spots)
    total = x.sum(dim=(0, 1), dtype=torch.float64)
    return float((nonzero * spots).sum()) * across, float((total * spots).sum()) * across


def _met(
    size: int, out: int, kernel: int, stride: int, padding: int, dilation: int, *, transposed: bool
) -> Tensor:
    """Return for each place of an axis how many outputs it goes into."""
    taps = torch.arange(kernel) * dilation
    if transposed:
        reached = torch.arange(size)[:, None] * stride - padding + taps
        return ((reached >= 0) & (reached < out)).sum(1)
    read = (torch.arange(out)[:, None] * stride - padding + taps).flatten()
    return torch.bincount(read[(read >= 0) & (read < size)], minlength=size)


def conv_macs(weight: Tensor, x: Tensor, out: Tensor, transposed: bool) -> int:
    """Return the multiply-adds of a convolution, padding included, as everybody counts them."""
    return prod(weight.shape[1:]) * (x.numel() if transposed else out.numel())


def met(a: Tensor, b: Tensor) -> float:
    """Sum up a matrix product ``[*, m, k] @ [*, k, n]``: of 0 and 1, how often a 1 meets a 1."""
    left, right = a.sum(-2, dtype=torch.float64), b.sum(-1, dtype=torch.float64)
    return float((left * right).sum())
