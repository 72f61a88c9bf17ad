# SPDX-License-Identifier: Apache-2.0
"""What all attention kernels share: dtypes, memory that they can read, sizes of tiles, a launch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from keymix.errors import UserError

LARGEST_TILE = 128
"""Rows of queries or keys that a program takes at most."""

_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def sum_dtype(t: Tensor) -> torch.dtype:
    """Return what sums over ``t`` are kept in: float32, or float64."""
    return torch.promote_types(t.dtype, torch.float32)


def precision() -> str:
    """Return the precision of float32 products, TF32 where PyTorch allows it."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def padded(width: int) -> int:
    """Return the width that a product of tiles takes: a power of two from 16 up."""
    return max(16, 1 << (width - 1).bit_length())


def tile(count: int, largest: int) -> int:
    """Return how many of ``count`` rows a program takes."""
    return min(padded(count), max(16, min(largest, LARGEST_TILE)))


def readable(t: Tensor) -> Tensor:
    """Make ``[..., R, D]`` a tensor whose channels are adjacent and whose rows 32 bits can tell."""
    adjacent = t.shape[-1] == 1 or t.stride(-1) == 1
    return t if adjacent and t.shape[-2] * t.stride(-2) < 2**31 else t.contiguous()


def steps(t: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a tensor of four axes, 0 along an axis of one and without a tensor."""
    if t is None:
        return (0,) * 4
    pairs = zip(t.stride(), t.shape, strict=True)
    return tuple(0 if size == 1 else stride for stride, size in pairs)


def check_dtype(q: Tensor) -> None:
    """Refuse float64 on a GPU, and what are no floating-point numbers that kernels know."""
    known = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if q.dtype not in known or (q.is_cuda and q.dtype == torch.float64):
        raise UserError(
            f"backend='triton' takes float32, float16 and bfloat16, not {q.dtype}; "
            "backend='reference' takes any"
        )


def launch(kernel: Any, programs: int, q: Tensor, *args: Any, **options: Any) -> None:
    """Run the programs of a kernel where its first tensor, the queries, lies."""
    if not programs:
        return
    wide = sum_dtype(q)
    # Triton launches on the current device
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[(programs,)](
            q,
            *args,
            DTYPE=_WIDE[wide],
            LOWEST=torch.finfo(wide).min,
            PRECISION=precision(),
            **options,
        )
