# SPDX-License-Identifier: Apache-2.0
"""Attention of each head by itself: queries, or their neighbourhoods on a grid, against keys.

A program of the forward kernel takes a block of queries past all keys and keeps the running
maximum and sum of the softmax. The backward kernels form each tile of the map again: one sums over
keys for the queries, one over queries for keys and values, one for the additive bias.

A key has one row of channels for each tap of a k x k filter; a plain key has one tap. A query
meets tap (y, x) with the query that lies there relative to it, zeros outside the image: the
neighbourhood is read, never copied.

In here B are the leading axes and G the heads: queries ``[B, G, N, d]``, values ``[B, G, M, e]``,
keys ``[B or 1, G, M, taps, d]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from jaxtyping import Float
from torch import Tensor

from keymix.ops.attention.axes import Axes
from keymix.ops.attention.triton.launch import (
    check_dtype,
    computes_in,
    launch,
    padded,
    readable,
    steps,
    sum_dtype,
    tile,
)
from keymix.ops.tracing import batched, gradients_of

Activation = Literal["softmax", "gelu", "relu", "star_relu"]

_REGISTERS = 96 * 2**10  # bytes of sums that a program keeps at most, of the 256 KiB of a processor
_PROGRAMS = 512  # of a GPU: about four for each of its processors

# ---- what a tile is made of -----------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _source(n, N, W, TAP: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the query lies that query n has at a tap, and whether it lies in the image."""
    inside = n < N
    if SIDE > 1:
        y = n // W + TAP // SIDE - SIDE // 2
        x = n % W + TAP % SIDE - SIDE // 2
        inside = inside & (y >= 0) & (y < N // W) & (x >= 0) & (x < W)
        n = y * W + x
    return n, inside


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows(pointer, n, inside, step, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of channels, zeros where there are none."""
    c = tl.arange(0, PADDED)
    mask = inside[:, None] & (c < WIDTH)[None, :]
    return tl.load(pointer + n[:, None] * step + c[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scores(  # type: ignore[no-untyped-def]
    q,
    k,
    shift,
    bias,
    n,
    m,
    N,
    M,
    W,
    q_n,
    k_m,
    bias_n,
    bias_m,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    SCALE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    DTYPE: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    DP: tl.constexpr,
):
    """Logits of queries n and keys m; those of keys that do not exist are finite."""
    s = tl.zeros([n.shape[0], m.shape[0]], dtype=DTYPE)
    for tap in tl.static_range(SIDE * SIDE):
        source, inside = _source(n, N, W, tap, SIDE)
        queries = _rows(q, source, inside, q_n, D, DP)
        keys = _rows(k + tap * D, m, m < M, k_m, D, DP)
        s = tl.dot(queries, tl.trans(keys), s, input_precision=PRECISION, out_dtype=DTYPE)
    if shift is not None:
        s += tl.load(shift + m, mask=m < M, other=0.0).to(DTYPE)[None, :]
    s *= tl.full([1, 1], SCALE, DTYPE)
    if bias is not None:
        at = n.to(tl.int64)[:, None] * bias_n + m[None, :] * bias_m
        inside = (n < N)[:, None] & (m < M)[None, :]
        s += tl.load(bias + at, mask=inside, other=0.0).to(DTYPE)
    if DIAGONAL is not None:
        s = tl.where(n[:, None] + DIAGONAL == m[None, :], tl.full([1, 1], LOWEST, DTYPE), s)
    return s


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _activated(s, m, M, numbers, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of an activation that acts on single logits."""
    if ACTIVATION == "gelu":
        root = tl.full([1, 1], 0.7071067811865476, s.dtype)  # of a half
        p = 0.5 * s * (1 + tl.erf(s * root))
    else:
        p = tl.where(s <= 0, 0.0, s)
        if ACTIVATION == "star_relu":
            p = tl.load(numbers) * p * p + tl.load(numbers + 1)
    return tl.where((m < M)[None, :], p, 0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _slope(s, numbers, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Derivative of an activation that acts on single logits."""
    if ACTIVATION == "gelu":
        root = tl.full([1, 1], 0.7071067811865476, s.dtype)
        density = tl.full([1, 1], 0.3989422804014327, s.dtype)  # of the normal distribution at 0
        return 0.5 * (1 + tl.erf(s * root)) + s * density * tl.exp(-0.5 * s * s)
    elif ACTIVATION == "star_relu":  # noqa: RET505 # Triton wants all branches named
        return 2 * tl.load(numbers) * tl.where(s > 0, s, 0.0)
    else:
        return tl.where(s > 0, 1.0, 0.0).to(s.dtype)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile_gradients(  # type: ignore[no-untyped-def]
    s,
    grad,
    values,
    numbers,
    lse,
    delta,
    n,
    m,
    N,
    M,
    ACTIVATION: tl.constexpr,
    DIAGONAL: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights, their gradient and that of the logits, ``[n, m]``, from logits of a tile."""
    dp = tl.zeros([n.shape[0], m.shape[0]], dtype=DTYPE)
    dp = tl.dot(grad, tl.trans(values), dp, input_precision=PRECISION, out_dtype=DTYPE)
    if ACTIVATION == "softmax":
        there = n < N
        total = tl.load(lse + n, mask=there, other=0.0)
        p = tl.where(there[:, None] & (m < M)[None, :], tl.exp(s - total[:, None]), 0.0)
        ds = p * (dp - tl.load(delta + n, mask=there, other=0.0)[:, None])
    else:
        p = _activated(s, m, M, numbers, ACTIVATION)
        ds = dp * _slope(s, numbers, ACTIVATION)
    if DIAGONAL is not None:
        ds = tl.where(n[:, None] + DIAGONAL == m[None, :], 0.0, ds)
    return p, dp, ds


# ---- kernels --------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    shift,
    v,
    bias,
    numbers,
    out,
    lse,
    q_b,
    q_g,
    q_n,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    bias_b,
    bias_g,
    bias_n,
    bias_m,
    out_b,
    out_g,
    out_n,
    B,
    G,
    N,
    M,
    W,
    D: tl.constexpr,
    E: tl.constexpr,
    SIDE: tl.constexpr,
    SCALE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
):
    blocks = tl.cdiv(N, BN)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    b = (tl.program_id(0) // blocks % B).to(tl.int64)
    g = (tl.program_id(0) // blocks // B).to(tl.int64)
    q += b * q_b + g * q_g
    k += b * k_b + g * k_g
    v += b * v_b + g * v_g
    if shift is not None:
        shift += g * M
    if bias is not None:
        bias += b * bias_b + g * bias_g
    sums = tl.zeros([BN, EP], dtype=DTYPE)
    top = tl.full([BN], float("-inf"), DTYPE)
    total = tl.zeros([BN], dtype=DTYPE)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        s = _scores(
            q, k, shift, bias, n, m, N, M, W, q_n, k_m, bias_n, bias_m,
            D, SIDE, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION, DP,
        )  # fmt: skip
        if ACTIVATION == "softmax":
            s = tl.where((m < M)[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            # where all so far are masked by minus infinity, nothing is taken off
            level = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp(s - level[:, None])
            shrink = tl.exp(top - level)
            total = total * shrink + tl.sum(p, 1)
            sums = sums * shrink[:, None]
            top = higher
        else:
            p = _activated(s, m, M, numbers, ACTIVATION)
        values = _rows(v, m, m < M, v_m, E, EP)
        sums = tl.dot(p.to(values.dtype), values, sums, input_precision=PRECISION, out_dtype=DTYPE)
    if ACTIVATION == "softmax":
        sums = sums / total[:, None]
        level = tl.where(top == float("-inf"), 0.0, top)
        tl.store(lse + (b * G + g) * N + n, level + tl.log(total), mask=n < N)
    e = tl.arange(0, EP)
    at = out + b * out_b + g * out_g + n[:, None] * out_n + e[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=(n < N)[:, None] & (e < E)[None, :])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _query_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    shift,
    v,
    bias,
    numbers,
    grad,
    lse,
    delta,
    grad_q,
    q_b,
    q_g,
    q_n,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    bias_b,
    bias_g,
    bias_n,
    bias_m,
    grad_b,
    grad_g,
    grad_n,
    B,
    G,
    N,
    M,
    W,
    D: tl.constexpr,
    E: tl.constexpr,
    SIDE: tl.constexpr,
    SCALE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FIRST: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Add what taps ``FIRST`` … ``FIRST + TAPS - 1`` bring to the gradient of the queries."""
    blocks = tl.cdiv(N, BN)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    b = (tl.program_id(0) // blocks % B).to(tl.int64)
    g = (tl.program_id(0) // blocks // B).to(tl.int64)
    q += b * q_b + g * q_g
    k += b * k_b + g * k_g
    v += b * v_b + g * v_g
    lse += (b * G + g) * N
    delta += (b * G + g) * N
    if shift is not None:
        shift += g * M
    if bias is not None:
        bias += b * bias_b + g * bias_g
    dy = _rows(grad + b * grad_b + g * grad_g, n, n < N, grad_n, E, EP)
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros([BN, DP], dtype=DTYPE),)  # noqa: RUF005 # Triton adds tuples
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        s = _scores(
            q, k, shift, bias, n, m, N, M, W, q_n, k_m, bias_n, bias_m,
            D, SIDE, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION, DP,
        )  # fmt: skip
        values = _rows(v, m, m < M, v_m, E, EP)
        _, _, ds = _tile_gradients(
            s, dy, values, numbers, lse, delta, n, m, N, M, ACTIVATION, DIAGONAL, DTYPE, PRECISION
        )
        ds = ds.to(k.dtype.element_ty)
        more = ()
        for i in tl.static_range(TAPS):
            keys = _rows(k + (FIRST + i) * D, m, m < M, k_m, D, DP)
            made = tl.dot(ds, keys, sums[i], input_precision=PRECISION, out_dtype=DTYPE)
            more = more + (made,)  # noqa: RUF005
        sums = more
    c = tl.arange(0, DP)
    grad_q += (b * G + g) * N * D
    for i in tl.static_range(TAPS):
        source, inside = _source(n, N, W, FIRST + i, SIDE)
        at = grad_q + source[:, None] * D + c[None, :]
        mask = inside[:, None] & (c < D)[None, :]
        found = sums[i] * tl.full([1, 1], SCALE, DTYPE)
        if SIDE == 1:
            tl.store(at, found.to(grad_q.dtype.element_ty), mask=mask)
        elif TAPS == 1:  # no two programs of a launch meet
            tl.store(at, tl.load(at, mask=mask, other=0.0) + found, mask=mask)
        else:
            tl.atomic_add(at, found, mask=mask, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _key_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0915 # a kernel is one function
    q,
    k,
    shift,
    v,
    bias,
    numbers,
    grad,
    lse,
    delta,
    grad_k,
    grad_shift,
    grad_v,
    grad_numbers,
    q_b,
    q_g,
    q_n,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    bias_b,
    bias_g,
    bias_n,
    bias_m,
    grad_b,
    grad_g,
    grad_n,
    B,
    G,
    N,
    M,
    W,
    SPLITS,
    D: tl.constexpr,
    E: tl.constexpr,
    SIDE: tl.constexpr,
    SCALE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FIRST: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Sum over the queries of a share of B: ``TAPS`` taps of the keys, with the first all else."""
    blocks = tl.cdiv(M, BM)
    m = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    split = tl.program_id(0) // blocks % SPLITS
    g = (tl.program_id(0) // blocks // SPLITS).to(tl.int64)
    if shift is not None:
        shift += g * M
    taps: tl.constexpr = SIDE * SIDE
    e = tl.arange(0, EP)
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros([BM, DP], dtype=DTYPE),)  # noqa: RUF005
    shifts = tl.zeros([BM], dtype=DTYPE)
    factor = tl.zeros([BM], dtype=DTYPE)
    added = tl.zeros([BM], dtype=DTYPE)
    for image in range(split, B, SPLITS):
        b = tl.cast(image, tl.int64)
        here = k + b * k_b + g * k_g
        bias_here = bias
        if bias is not None:
            bias_here = bias + b * bias_b + g * bias_g
        values = _rows(v + b * v_b + g * v_g, m, m < M, v_m, E, EP)
        of_values = tl.zeros([BM, EP], dtype=DTYPE)
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            s = _scores(
                q + b * q_b + g * q_g, here, shift, bias_here,
                n, m, N, M, W, q_n, k_m, bias_n, bias_m,
                D, SIDE, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION, DP,
            )  # fmt: skip
            dy = _rows(grad + b * grad_b + g * grad_g, n, n < N, grad_n, E, EP)
            p, dp, ds = _tile_gradients(
                s, dy, values, numbers, lse + (b * G + g) * N, delta + (b * G + g) * N,
                n, m, N, M, ACTIVATION, DIAGONAL, DTYPE, PRECISION,
            )  # fmt: skip
            if FIRST == 0:
                weights = tl.trans(p.to(dy.dtype))
                of_values = tl.dot(
                    weights, dy, of_values, input_precision=PRECISION, out_dtype=DTYPE
                )
                shifts += tl.sum(ds, 0)
                if ACTIVATION == "star_relu":
                    positive = tl.where(s > 0, s, 0.0)
                    factor += tl.sum(dp * positive * positive, 0)
                    added += tl.sum(dp, 0)
            ds = tl.trans(ds.to(q.dtype.element_ty))
            more = ()
            for i in tl.static_range(TAPS):
                source, inside = _source(n, N, W, FIRST + i, SIDE)
                queries = _rows(q + b * q_b + g * q_g, source, inside, q_n, D, DP)
                made = tl.dot(ds, queries, sums[i], input_precision=PRECISION, out_dtype=DTYPE)
                more = more + (made,)  # noqa: RUF005
            sums = more
        if FIRST == 0:
            at = grad_v + ((b * G + g) * M + m[:, None]) * E + e[None, :]
            there = (m < M)[:, None] & (e < E)[None, :]
            tl.store(at, of_values.to(grad_v.dtype.element_ty), mask=there)
    row = (split * G + g) * M + m
    c = tl.arange(0, DP)
    for i in tl.static_range(TAPS):
        at = grad_k + (row[:, None] * taps + FIRST + i) * D + c[None, :]
        found = sums[i] * tl.full([1, 1], SCALE, DTYPE)
        tl.store(at, found, mask=(m < M)[:, None] & (c < D)[None, :])
    if FIRST == 0:
        if grad_shift is not None:
            tl.store(grad_shift + row, shifts * tl.full([1], SCALE, DTYPE), mask=m < M)
        if ACTIVATION == "star_relu":
            tl.store(grad_numbers + 2 * row, factor, mask=m < M)
            tl.store(grad_numbers + 2 * row + 1, added, mask=m < M)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bias_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    shift,
    v,
    bias,
    numbers,
    grad,
    lse,
    delta,
    found,
    q_b,
    q_g,
    q_n,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    bias_b,
    bias_g,
    bias_n,
    bias_m,
    grad_b,
    grad_g,
    grad_n,
    B,
    G,
    N,
    M,
    W,
    SPLITS,
    KEPT_B,
    KEPT_G,
    D: tl.constexpr,
    E: tl.constexpr,
    SIDE: tl.constexpr,
    SCALE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum a tile of the logits' gradient over the heads and images that share a bias.

    Without ``ROWS`` it sums over the tile's queries too, without ``COLUMNS`` over its keys.
    """
    across, down = tl.cdiv(M, BM), tl.cdiv(N, BN)
    rest = tl.program_id(0) // across
    column, row = tl.program_id(0) % across, rest % down
    rest = rest // down
    split, kept = rest % SPLITS, rest // SPLITS
    m = column * BM + tl.arange(0, BM)
    n = row * BN + tl.arange(0, BN)
    # of those that share this bias, every SPLITS-th
    shared_b, shared_g = B // KEPT_B, G // KEPT_G
    sums = tl.zeros([BN, BM], dtype=DTYPE)
    for each in range(split, shared_b * shared_g, SPLITS):
        b = tl.cast(kept // KEPT_G + each // shared_g, tl.int64)
        g = tl.cast(kept % KEPT_G + each % shared_g, tl.int64)
        shift_here = shift
        if shift is not None:
            shift_here = shift + g * M
        s = _scores(
            q + b * q_b + g * q_g, k + b * k_b + g * k_g, shift_here,
            bias + b * bias_b + g * bias_g, n, m, N, M, W, q_n, k_m, bias_n, bias_m,
            D, SIDE, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION, DP,
        )  # fmt: skip
        dy = _rows(grad + b * grad_b + g * grad_g, n, n < N, grad_n, E, EP)
        values = _rows(v + b * v_b + g * v_g, m, m < M, v_m, E, EP)
        _, _, ds = _tile_gradients(
            s, dy, values, numbers, lse + (b * G + g) * N, delta + (b * G + g) * N,
            n, m, N, M, ACTIVATION, DIAGONAL, DTYPE, PRECISION,
        )  # fmt: skip
        sums += ds
    # values of keys that do not exist are zero, and so is the gradient of rows that do not
    part = rest.to(tl.int64)
    if ROWS and COLUMNS:
        at = (part * N + n[:, None]) * M + m[None, :]
        tl.store(found + at, sums, mask=(n < N)[:, None] & (m < M)[None, :])
    elif ROWS:
        tl.store(found + (part * N + n) * across + column, tl.sum(sums, 1), mask=n < N)
    elif COLUMNS:
        tl.store(found + (part * down + row) * M + m, tl.sum(sums, 0), mask=m < M)
    else:
        tl.store(found + (part * down + row) * across + column, tl.sum(tl.sum(sums, 1), 0))


# ---- around the kernels ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _How:
    """What a call computes besides its tensors."""

    activation: Activation
    scale: float
    diagonal: int | None  # a query n does not see key n + diagonal
    width: int  # W of the image, which matters from 3 x 3 taps on


@dataclass(frozen=True)
class _Call:
    """Tensors of a call as kernels read them."""

    how: _How
    q: Tensor
    k: Tensor
    shift: Tensor | None
    v: Tensor
    bias: Tensor | None
    numbers: Tensor | None

    @classmethod
    def of(cls, how: _How, q: Tensor, k: Tensor, shift: Any, v: Tensor, *rest: Any) -> _Call:
        """Make the channels of queries, keys and values adjacent in memory."""
        keys = readable(k.flatten(-2)).unflatten(-1, k.shape[-2:])
        return cls(how, readable(q), keys, shift, readable(v), *rest)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, G, N and M."""
        return (*self.q.shape[:3], self.v.shape[2])

    @property
    def taps(self) -> int:
        """Number of taps of a key."""
        return self.k.shape[3]

    def tiles(self, *, backward: bool) -> dict[str, int]:
        """Return tiles and warps. They shrink with the width; what is best is not yet measured."""
        B, G, N, M = self.sizes
        width = max(padded(self.q.shape[-1]), padded(self.v.shape[-1]))
        room = 2**14 // (width * self.q.element_size())  # 128 rows of 64 channels in 16 bits
        many = backward or self.taps > 1
        return {
            "BN": tile(N, room // 2 if many else room),
            "BM": tile(M, room // 2),
            "num_warps": 8 if many or self.taps > 1 else 4,
            "num_stages": 1 if self.taps > 1 else 2,
        }

    def taps_at_once(self, rows: int, *, alone: bool = False) -> int:
        """Return of how many taps a program keeps the sums over ``rows`` rows."""
        each = rows * padded(self.q.shape[-1]) * sum_dtype(self.q).itemsize
        most = 1 if alone else max(1, min(self.taps, _REGISTERS // each))
        return math.ceil(self.taps / math.ceil(self.taps / most))

    def run(
        self,
        kernel: Any,
        programs: int,
        tensors: Sequence[Tensor | None],
        more: Tensor,
        numbers: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """Run a kernel, its own tensors and strides of the last of them after those of all."""
        q, k, v = self.q, self.k, self.v
        how, side = self.how, math.isqrt(self.taps)
        launch(
            kernel,
            programs,
            q,
            *(q, k, self.shift, v, self.bias, self.numbers, *tensors),
            *steps(q)[:3],
            *steps(k[..., 0, :])[:3],
            *steps(v)[:3],
            *steps(self.bias),
            *steps(more)[:3],
            *self.sizes,
            how.width,
            *numbers,
            D=q.shape[-1],
            E=v.shape[-1],
            SIDE=side,
            SCALE=how.scale,
            DIAGONAL=how.diagonal,
            ACTIVATION=how.activation,
            DP=padded(q.shape[-1]),
            EP=padded(v.shape[-1]),
            **computes_in(q),
            **options,
        )


def _forward(call: _Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, G, N, e]``, heads next to channels in memory, and the softmax's sums, as logarithms."""
    B, G, N, _ = call.sizes
    out = call.v.new_empty(B, N, G, call.v.shape[-1]).transpose(1, 2)
    lse = call.q.new_empty(B, G, N, dtype=sum_dtype(call.q))
    tiles = call.tiles(backward=False)
    call.run(_forward_kernel, triton.cdiv(N, tiles["BN"]) * B * G, (out, lse), out, **tiles)
    return out, lse


def _query_gradient(call: _Call, grad: Tensor, sums: Sequence[Tensor]) -> Tensor:
    B, G, N, _ = call.sizes
    q, tiles = call.q, call.tiles(backward=True)
    shape = (B, G, N, q.shape[-1])
    # programs of other blocks add to the same rows, in an order that is never the same
    plain = call.taps == 1
    found = q.new_empty(shape) if plain else q.new_zeros(shape, dtype=sum_dtype(q))
    alone = torch.are_deterministic_algorithms_enabled()
    most = call.taps_at_once(tiles["BN"], alone=alone)
    for first in range(0, call.taps, most):
        call.run(
            _query_kernel,
            triton.cdiv(N, tiles["BN"]) * B * G,
            (grad, *sums, found),
            grad,
            FIRST=first,
            TAPS=min(most, call.taps - first),
            **tiles,
        )
    return found.to(q.dtype)


def _key_gradients(
    call: _Call, grad: Tensor, sums: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of keys, shift, values and the activation's numbers."""
    B, G, N, M = call.sizes
    q, k, v, tiles = call.q, call.k, call.v, call.tiles(backward=True)
    blocks, wide = triton.cdiv(M, tiles["BM"]), sum_dtype(call.q)
    shared = len(k) == 1
    # images that share keys are dealt to some programs, whose sums are added up in order
    splits = max(1, min(B, _PROGRAMS // max(1, blocks * G))) if shared else B
    of_keys = q.new_empty(splits, *k.shape[1:], dtype=wide)
    of_shift = None if call.shift is None else q.new_empty(splits, G, M, dtype=wide)
    of_values = v.new_empty(v.shape)
    of_numbers = None if call.numbers is None else q.new_empty(splits, G, M, 2, dtype=wide)
    most = call.taps_at_once(tiles["BM"])
    for first in range(0, call.taps, most):
        call.run(
            _key_kernel,
            blocks * splits * G,
            (grad, *sums, of_keys, of_shift, of_values, of_numbers),
            grad,
            (splits,),
            FIRST=first,
            TAPS=min(most, call.taps - first),
            **tiles,
        )
    return (
        (of_keys.sum(0, keepdim=True) if shared else of_keys).to(k.dtype),
        None if of_shift is None else of_shift.sum(0),
        of_values,
        None if of_numbers is None else of_numbers.sum((0, 1, 2)),
    )


def _bias_gradient(call: _Call, bias: Tensor, grad: Tensor, sums: Sequence[Tensor]) -> Tensor:
    B, G, N, M = call.sizes
    tiles = call.tiles(backward=True)
    down, across = triton.cdiv(N, tiles["BN"]), triton.cdiv(M, tiles["BM"])
    kept_b, kept_g, rows, columns = bias.shape
    kept = kept_b * kept_g
    sharing = B * G // max(1, kept)
    splits = max(1, min(sharing, _PROGRAMS // max(1, kept * down * across)))
    whole = (rows > 1 or N == 1, columns > 1 or M == 1)
    found = grad.new_empty(
        *(kept_b, kept_g, splits),
        *(size if all_ else blocks for size, all_, blocks in zip((N, M), whole, (down, across))),
        dtype=sum_dtype(call.q),
    )
    call.run(
        _bias_kernel,
        kept * splits * down * across,
        (grad, *sums, found),
        grad,
        (splits, kept_b, kept_g),
        ROWS=whole[0],
        COLUMNS=whole[1],
        **tiles,
    )
    return found.sum(2).sum_to_size(bias.shape).to(bias.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: _How,
        q: Tensor,
        k: Tensor,
        shift: Tensor | None,
        v: Tensor,
        bias: Tensor | None,
        numbers: Tensor | None,
    ) -> Tensor:
        call = _Call.of(how, q, k, shift, v, bias, numbers)
        out, lse = _forward(call)
        ctx.how = how
        ctx.save_for_backward(q, k, shift, v, bias, numbers, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        how: _How = ctx.how
        *inputs, out, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or batched(grad):
            return (None, *gradients_of(partial(_plain, how), inputs, needs, (grad,)))
        call, bias, grad = _Call.of(how, *inputs), inputs[4], readable(grad)
        # of a softmax the sum of p dp over a row is that of dy y
        sums = (lse, (grad.to(lse.dtype) * out).sum(-1))
        of_queries = _query_gradient(call, grad, sums) if needs[0] else None
        of_keys = of_shift = of_values = of_numbers = None
        if any((*needs[1:4], needs[5])):
            of_keys, of_shift, of_values, of_numbers = _key_gradients(call, grad, sums)
        of_bias = _bias_gradient(call, bias, grad, sums) if needs[4] else None
        return None, of_queries, of_keys, of_shift, of_values, of_bias, of_numbers


def _plain(
    how: _How,
    q: Tensor,
    k: Tensor,
    shift: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    numbers: Tensor | None,
) -> tuple[Tensor]:
    """Compute the same with the whole map, by operations that have gradients of gradients."""
    given, wide = v.dtype, sum_dtype(q)
    q, k, v = (t.to(wide) for t in (q, k, v))
    side = math.isqrt(k.shape[3])
    if side > 1:
        edge, width = side // 2, how.width
        height = q.shape[2] // width
        image = F.pad(q.unflatten(2, (height, width)), (0, 0, edge, edge, edge, edge))
        near = [
            image[:, :, y : y + height, x : x + width] for y in range(side) for x in range(side)
        ]
        q = torch.stack(near, -2).flatten(2, 3).flatten(-2)
    s = q @ k.flatten(-2).transpose(-2, -1)
    if shift is not None:
        s = s + shift[:, None, :]
    s = s * how.scale
    if bias is not None:
        s = s + bias
    if how.diagonal is not None:
        n, m = (torch.arange(size, device=s.device) for size in s.shape[-2:])
        s = s.masked_fill(n[:, None] + how.diagonal == m, torch.finfo(s.dtype).min)
    if how.activation == "softmax":
        maps = s.softmax(-1)
    elif how.activation == "gelu":
        maps = F.gelu(s)
    else:
        maps = F.relu(s)
        if numbers is not None:
            maps = numbers[0] * maps.square() + numbers[1]
    return ((maps @ v).to(given),)


# ---- calls ----------------------------------------------------------------------------------


def attention(
    q: Float[Tensor, "*batch h N d"],
    k: Float[Tensor, "*keys h M d"],
    v: Float[Tensor, "*batch h M e"],
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    diagonal: int | None = None,
    activation: Activation = "softmax",
    learned: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "*batch h N e"], None]:
    r"""Compute :math:`\mathrm{softmax}(s\,Q K^\top + b)\,V`, or another activation's, by kernels.

    Leading axes that keys lack are shared by all that has them, without a copy. b broadcasts to
    ``[*, h, N, M]``; a query n does not see key n + ``diagonal``. ``learned`` are scale and bias
    of StarReLU. Sums are in float32. Gradients of gradients form the whole map.

    Raises:
        UserError: If q is in float64 on a GPU.
    """
    lead, own = q.shape[:-3], k.ndim - 3
    each = 0 < own == len(lead)  # keys of every image
    axes = Axes(lead, q.shape[-3], 0 if each else own)
    keys = k.expand(*lead[len(lead) - own :], *k.shape[-3:])
    keys = axes.split(keys) if each else keys.reshape(1, axes.sizes[1], *k.shape[-2:])
    return _computed(axes, q, keys[..., None, :], None, v, scale, bias, diagonal, 1, activation, learned)


def conv_attention(
    q: Float[Tensor, "*batch h N d"],
    weight: Float[Tensor, "filters d k k"],
    shift: Float[Tensor, " filters"],
    v: Float[Tensor, "*batch h M e"],
    *,
    grid: tuple[int, int],
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    diagonal: int | None = None,
    activation: Activation = "softmax",
    learned: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "*batch h N e"], None]:
    """Compute :func:`attention` whose logits a convolution of the queries on ``grid`` gives.

    Filters are one for each head and key; where there are as many as for several times the heads,
    the last leading axis of q, such as windows, has filters of its own.

    Raises:
        UserError: If q is in float64 on a GPU.
    """
    heads = len(weight) // v.shape[-2]
    axes = Axes(q.shape[:-3], q.shape[-3], int(heads > q.shape[-3]))
    keys = weight.flatten(2).transpose(1, 2).unflatten(0, (1, heads, v.shape[-2])).contiguous()
    added = shift.unflatten(0, (heads, v.shape[-2]))
    return _computed(axes, q, keys, added, v, scale, bias, diagonal, grid[1], activation, learned)


def _computed(
    axes: Axes,
    q: Tensor,
    keys: Tensor,
    shift: Tensor | None,
    v: Tensor,
    scale: float | Tensor,
    bias: Tensor | None,
    diagonal: int | None,
    width: int,
    activation: Activation,
    learned: Sequence[Tensor],
) -> tuple[Tensor, None]:
    """Run, and bring the output to ``[*, h, N, e]``."""
    check_dtype(q)
    wide = sum_dtype(q)
    if isinstance(scale, Tensor):
        q = q * scale.to(q.dtype)
        shift = None if shift is None else shift * scale
        scale = 1.0
    how = _How(activation=activation, scale=scale, diagonal=diagonal, width=width)
    out = _Attention.apply(
        how,
        axes.split(q),
        keys.to(q.dtype),
        None if shift is None else shift.to(wide).contiguous(),
        axes.split(v.to(q.dtype)),
        None if bias is None else axes.bias(bias),
        torch.cat([t.to(wide).flatten() for t in learned]) if learned else None,
    )
    return axes.joined(out), None
