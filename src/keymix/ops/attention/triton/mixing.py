# SPDX-License-Identifier: Apache-2.0
"""Attention whose maps are mixed over heads after the softmax: all heads of a tile together.

A first kernel leaves the logarithm of the softmax's sums. The others hold a tile of the maps of
all heads, ``[h, n, m]``: scores and values are products per head, the mixing is one product of
``[h, h]`` with the tile. Heads are padded to 16, the least that a product takes.

In here B are all leading axes: queries ``[B, h, N, d]``, keys and values ``[B or 1, h, M, d]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from jaxtyping import Float
from torch import Tensor

from keymix.ops.attention.axes import Axes
from keymix.ops.attention.triton.launch import (
    check_dtype,
    launch,
    padded,
    precision,
    readable,
    steps,
    sum_dtype,
)
from keymix.ops.tracing import batched, gradients_of

# ---- what a tile is made of -----------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows(  # type: ignore[no-untyped-def]
    pointer,
    rows,
    count,
    step_h,
    step_r,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    HP: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Rows of all heads ``[h, r, c]``, zeros where there are none."""
    h, c = tl.arange(0, HP)[:, None, None], tl.arange(0, PADDED)[None, None, :]
    r = rows[None, :, None]
    mask = (h < H) & (r < count) & (c < WIDTH)
    return tl.load(pointer + h * step_h + r * step_r + c, mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _square(pointer, row, column, H: tl.constexpr, HP: tl.constexpr):  # type: ignore[no-untyped-def]
    """A matrix over heads, ``row`` and ``column`` the steps of its axes."""
    i, j = tl.arange(0, HP)[:, None], tl.arange(0, HP)[None, :]
    return tl.load(pointer + i * row + j * column, mask=(i < H) & (j < H), other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _each(pointer, H: tl.constexpr, HP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of the heads, ``[h, 1, 1]``."""
    h = tl.arange(0, HP)
    return tl.load(pointer + h, mask=h < H, other=0.0)[:, None, None]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _over_heads(matrix, t, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply ``[g, h]`` by a tile ``[h, n, m]``."""
    flat = tl.reshape(t, [t.shape[0], t.shape[1] * t.shape[2]])
    flat = tl.dot(matrix, flat, input_precision=PRECISION, out_dtype=t.dtype)
    return tl.reshape(flat, t.shape)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _products(a, b, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum over a tile the products of every two heads, ``[h, g]``."""
    one = tl.reshape(a, [a.shape[0], a.shape[1] * a.shape[2]])
    other = tl.reshape(b, [b.shape[0], b.shape[1] * b.shape[2]])
    return tl.dot(one, tl.trans(other), input_precision=PRECISION, out_dtype=a.dtype)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _logits(  # type: ignore[no-untyped-def]
    queries,
    keys,
    bias,
    n,
    m,
    N,
    M,
    bias_h,
    bias_n,
    bias_m,
    H: tl.constexpr,
    HP: tl.constexpr,
    SCALE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    DTYPE: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of a tile, minus infinity where there is no key."""
    s = tl.dot(
        queries, tl.permute(keys, (0, 2, 1)), input_precision=PRECISION, out_dtype=DTYPE
    ) * tl.full([1, 1, 1], SCALE, DTYPE)
    h, n, m = tl.arange(0, HP)[:, None, None], n[None, :, None], m[None, None, :]
    if bias is not None:
        at = h.to(tl.int64) * bias_h + n.to(tl.int64) * bias_n + m * bias_m
        s += tl.load(bias + at, mask=(h < H) & (n < N) & (m < M), other=0.0).to(DTYPE)
    if DIAGONAL is not None:
        s = tl.where(n + DIAGONAL == m, tl.full([1, 1, 1], LOWEST, DTYPE), s)
    return tl.where(m < M, s, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weights(s, lse, n, m, N, M, LAYER: tl.constexpr, H: tl.constexpr, HP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax of a tile, and what is mixed: under BatchNorm the weights less their mean."""
    h, row = tl.arange(0, HP)[:, None], n[None, :]
    total = tl.load(lse + h * N + row, mask=(h < H) & (row < N), other=0.0)
    there = ((h < H) & (row < N))[:, :, None] & (m < M)[None, None, :]
    p = tl.where(there, tl.exp(s - total[:, :, None]), 0.0)
    c = p
    if not LAYER:
        count = tl.full([1, 1, 1], 1, s.dtype) * M
        c = tl.where(there, p - 1 / count, 0.0)
    return p, c


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _normed(  # type: ignore[no-untyped-def]
    mixed, added, weight, offset, H: tl.constexpr, HP: tl.constexpr, EPS: tl.constexpr
):
    """LayerNorm of a tile over its heads: the map, what it is before the gain, and the rate."""
    if added is not None:
        mixed += _each(added, H, HP)
    centred = mixed - (tl.sum(mixed, 0) / H)[None, :, :]
    centred = tl.where((tl.arange(0, HP) < H)[:, None, None], centred, 0.0)
    variance = tl.sum(centred * centred, 0) / H + tl.full([1, 1], EPS, mixed.dtype)
    rate = (1 / tl.sqrt(variance))[None, :, :]
    even = centred * rate
    return even * _each(weight, H, HP) + _each(offset, H, HP), even, rate


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _through_norm(dmaps, even, rate, weight, H: tl.constexpr, HP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of the mixed maps from that of the map."""
    d = dmaps * _each(weight, H, HP)
    off = (tl.sum(d, 0) / H)[None, :, :] + even * (tl.sum(d * even, 0) / H)[None, :, :]
    return tl.where((tl.arange(0, HP) < H)[:, None, None], rate * (d - off), 0.0)


# ---- kernels --------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sum_kernel(  # type: ignore[no-untyped-def]
    q, k, v, bias, theta, added, weight, offset, lse,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, bias_n, bias_m, N, M,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SCALE: tl.constexpr, DIAGONAL: tl.constexpr,
    LAYER: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr, LOWEST: tl.constexpr,
    PRECISION: tl.constexpr, MIXING: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Leave the logarithm of the sum of each row of the softmax."""
    blocks = tl.cdiv(N, BN)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    if bias is not None:
        bias += b * bias_b
    queries = _rows(q + b * q_b, n, N, q_h, q_n, H, D, HP, DP)
    top = tl.full([HP, BN], float("-inf"), DTYPE)
    total = tl.zeros([HP, BN], dtype=DTYPE)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        keys = _rows(k + b * k_b, m, M, k_h, k_m, H, D, HP, DP)
        s = _logits(
            queries, keys, bias, n, m, N, M, bias_h, bias_n, bias_m,
            H, HP, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 2))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(s - level[:, :, None]), 2)
        top = higher
    level = tl.where(top == float("-inf"), 0.0, top)
    h, row = tl.arange(0, HP)[:, None], n[None, :]
    at = lse + (b * H + h) * N + row
    tl.store(at, level + tl.log(total), mask=(h < H) & (row < N))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, bias, theta, added, weight, offset, lse, out, products,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, bias_n, bias_m, N, M,
    out_b, out_h, out_n,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SCALE: tl.constexpr, DIAGONAL: tl.constexpr,
    LAYER: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr, LOWEST: tl.constexpr,
    PRECISION: tl.constexpr, MIXING: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the output for a block of queries, and its share of the products of two heads."""
    blocks = tl.cdiv(N, BN)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    if bias is not None:
        bias += b * bias_b
    queries = _rows(q + b * q_b, n, N, q_h, q_n, H, D, HP, DP)
    turned = _square(theta, 1, H, H, HP)  # [g, h]
    sums = tl.zeros([HP, BN, EP], dtype=DTYPE)
    moments = tl.zeros([HP, HP], dtype=DTYPE)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        keys = _rows(k + b * k_b, m, M, k_h, k_m, H, D, HP, DP)
        s = _logits(
            queries, keys, bias, n, m, N, M, bias_h, bias_n, bias_m,
            H, HP, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION,
        )  # fmt: skip
        c = _weights(s, lse + b * H * N, n, m, N, M, LAYER, H, HP)[1]
        maps = _over_heads(turned, c, MIXING)
        if LAYER:
            maps = _normed(maps, added, weight, offset, H, HP, EPS)[0]
        if products is not None:
            moments += _products(c, c, MIXING)
        values = _rows(v + b * v_b, m, M, v_h, v_m, H, E, HP, EP)
        sums = tl.dot(
            maps.to(values.dtype), values, sums, input_precision=PRECISION, out_dtype=DTYPE
        )
    h, e = tl.arange(0, HP)[:, None, None], tl.arange(0, EP)[None, None, :]
    row = n[None, :, None]
    at = out + b * out_b + h * out_h + row * out_n + e
    tl.store(at, sums.to(out.dtype.element_ty), mask=(h < H) & (row < N) & (e < E))
    if products is not None:
        i, j = tl.arange(0, HP)[:, None], tl.arange(0, HP)[None, :]
        at = products + tl.program_id(0).to(tl.int64) * H * H + i * H + j
        tl.store(at, moments, mask=(i < H) & (j < H))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def query_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0915 # a kernel is one function
    q, k, v, bias, theta, added, weight, offset,
    lse, grad, both, delta, grad_q, grad_theta, vectors,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, bias_n, bias_m, N, M,
    grad_b, grad_h, grad_n,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SCALE: tl.constexpr, DIAGONAL: tl.constexpr,
    LAYER: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr, LOWEST: tl.constexpr,
    PRECISION: tl.constexpr, MIXING: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries, its share of those of what mixes, and the softmax's sums.

    Keys are passed twice: the second time the sum of p dp over each row is known.
    """
    blocks = tl.cdiv(N, BN)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    if bias is not None:
        bias += b * bias_b
    lse += b * H * N
    queries = _rows(q + b * q_b, n, N, q_h, q_n, H, D, HP, DP)
    dy = _rows(grad + b * grad_b, n, N, grad_h, grad_n, H, E, HP, EP)
    straight, turned = _square(theta, H, 1, H, HP), _square(theta, 1, H, H, HP)
    total = tl.zeros([HP, BN], dtype=DTYPE)
    sums = tl.zeros([HP, BN, DP], dtype=DTYPE)
    of_theta = tl.zeros([HP, HP], dtype=DTYPE)
    of_added = tl.zeros([HP], dtype=DTYPE)
    of_weight = tl.zeros([HP], dtype=DTYPE)
    of_offset = tl.zeros([HP], dtype=DTYPE)
    for turn in tl.static_range(2):
        for start in range(0, M, BM):
            m = start + tl.arange(0, BM)
            keys = _rows(k + b * k_b, m, M, k_h, k_m, H, D, HP, DP)
            s = _logits(
                queries, keys, bias, n, m, N, M, bias_h, bias_n, bias_m,
                H, HP, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION,
            )  # fmt: skip
            p, c = _weights(s, lse, n, m, N, M, LAYER, H, HP)
            values = _rows(v + b * v_b, m, M, v_h, v_m, H, E, HP, EP)
            d = tl.dot(
                dy, tl.permute(values, (0, 2, 1)), input_precision=PRECISION, out_dtype=DTYPE
            )
            if LAYER:
                mixed = _over_heads(turned, c, MIXING)
                maps, even, rate = _normed(mixed, added, weight, offset, H, HP, EPS)  # noqa: RUF059
                if turn == 1:
                    of_weight += tl.sum(tl.sum(d * even, 2), 1)
                    of_offset += tl.sum(tl.sum(d, 2), 1)
                d = _through_norm(d, even, rate, weight, H, HP)
                if turn == 1:
                    of_added += tl.sum(tl.sum(d, 2), 1)
            dp = _over_heads(straight, d, MIXING)
            if both is not None:
                dp += _over_heads(_square(both, H, 1, H, HP), c, MIXING)
            if turn == 0:
                total += tl.sum(p * dp, 2)
            else:
                of_theta += _products(c, d, MIXING)
                ds = p * (dp - total[:, :, None])
                if DIAGONAL is not None:
                    there = n[:, None] + DIAGONAL == m[None, :]
                    ds = tl.where(there[None, :, :], 0.0, ds)
                sums = tl.dot(
                    ds.to(keys.dtype), keys, sums, input_precision=PRECISION, out_dtype=DTYPE
                )
    h, row = tl.arange(0, HP)[:, None], n[None, :]
    tl.store(delta + (b * H + h) * N + row, total, mask=(h < H) & (row < N))
    h3, c3 = tl.arange(0, HP)[:, None, None], tl.arange(0, DP)[None, None, :]
    row3 = n[None, :, None]
    at = grad_q + ((b * H + h3) * N + row3) * D + c3
    found = (sums * tl.full([1, 1, 1], SCALE, DTYPE)).to(grad_q.dtype.element_ty)
    tl.store(at, found, mask=(h3 < H) & (row3 < N) & (c3 < D))
    part = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, HP)[:, None], tl.arange(0, HP)[None, :]
    tl.store(grad_theta + (part * H + i) * H + j, of_theta, mask=(i < H) & (j < H))
    if LAYER:
        g = tl.arange(0, HP)
        vectors += part * 3 * H
        tl.store(vectors + g, of_added, mask=g < H)
        tl.store(vectors + H + g, of_weight, mask=g < H)
        tl.store(vectors + 2 * H + g, of_offset, mask=g < H)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def key_kernel(  # type: ignore[no-untyped-def]
    q, k, v, bias, theta, added, weight, offset, lse, grad, both, delta, grad_k, grad_v,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, bias_n, bias_m, N, M,
    grad_b, grad_h, grad_n,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SCALE: tl.constexpr, DIAGONAL: tl.constexpr,
    LAYER: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr, LOWEST: tl.constexpr,
    PRECISION: tl.constexpr, MIXING: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values of one image."""
    blocks = tl.cdiv(M, BM)
    m = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    if bias is not None:
        bias += b * bias_b
    lse += b * H * N
    keys = _rows(k + b * k_b, m, M, k_h, k_m, H, D, HP, DP)
    values = _rows(v + b * v_b, m, M, v_h, v_m, H, E, HP, EP)
    straight, turned = _square(theta, H, 1, H, HP), _square(theta, 1, H, H, HP)
    of_keys = tl.zeros([HP, BM, DP], dtype=DTYPE)
    of_values = tl.zeros([HP, BM, EP], dtype=DTYPE)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        queries = _rows(q + b * q_b, n, N, q_h, q_n, H, D, HP, DP)
        dy = _rows(grad + b * grad_b, n, N, grad_h, grad_n, H, E, HP, EP)
        s = _logits(
            queries, keys, bias, n, m, N, M, bias_h, bias_n, bias_m,
            H, HP, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION,
        )  # fmt: skip
        p, c = _weights(s, lse, n, m, N, M, LAYER, H, HP)
        maps = _over_heads(turned, c, MIXING)
        d = tl.dot(dy, tl.permute(values, (0, 2, 1)), input_precision=PRECISION, out_dtype=DTYPE)
        if LAYER:
            maps, even, rate = _normed(maps, added, weight, offset, H, HP, EPS)
            d = _through_norm(d, even, rate, weight, H, HP)
        of_values = tl.dot(
            tl.permute(maps.to(dy.dtype), (0, 2, 1)), dy, of_values,
            input_precision=PRECISION, out_dtype=DTYPE,
        )  # fmt: skip
        dp = _over_heads(straight, d, MIXING)
        if both is not None:
            dp += _over_heads(_square(both, H, 1, H, HP), c, MIXING)
        h, row = tl.arange(0, HP)[:, None], n[None, :]
        at = delta + (b * H + h) * N + row
        total = tl.load(at, mask=(h < H) & (row < N), other=0.0)
        ds = p * (dp - total[:, :, None])
        if DIAGONAL is not None:
            ds = tl.where((n[:, None] + DIAGONAL == m[None, :])[None, :, :], 0.0, ds)
        of_keys = tl.dot(
            tl.permute(ds.to(queries.dtype), (0, 2, 1)), queries, of_keys,
            input_precision=PRECISION, out_dtype=DTYPE,
        )  # fmt: skip
    h, row = tl.arange(0, HP)[:, None, None], m[None, :, None]
    c, e = tl.arange(0, DP)[None, None, :], tl.arange(0, EP)[None, None, :]
    there = (h < H) & (row < M)
    of_keys = of_keys * tl.full([1, 1, 1], SCALE, DTYPE)
    line = (b * H + h) * M + row
    tl.store(grad_k + line * D + c, of_keys.to(grad_k.dtype.element_ty), mask=there & (c < D))
    tl.store(grad_v + line * E + e, of_values.to(grad_v.dtype.element_ty), mask=there & (e < E))


# ---- around the kernels ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _How:
    """What a call computes besides its tensors."""

    scale: float
    diagonal: int | None
    eps: float | None  # of a LayerNorm over the heads; None without one
    moments: bool


@dataclass(frozen=True)
class _Call:
    """Tensors of a call as kernels read them."""

    how: _How
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mixers: Sequence[Tensor | None]  # theta, and with a LayerNorm bias, weight and offset

    @property
    def rows(self) -> int:
        """Rows of queries, or of keys, that a program takes: 16 pass by, whatever is summed."""
        wide = max(self.q.shape[-1], self.v.shape[-1]) > 32
        return 8 if wide and self.q.element_size() > 2 else 16

    def programs(self, count: int) -> int:
        """Return how many programs take ``count`` queries, or keys, of every image."""
        return len(self.q) * -(-count // self.rows)

    def run(self, kernel: Any, tensors: Sequence[Tensor | None], more: Sequence[int]) -> None:
        """Run a kernel, its own tensors and numbers after those of all."""
        q, k, v, how = self.q, self.k, self.v, self.how
        of_keys = kernel is key_kernel
        launch(
            kernel,
            self.programs((k if of_keys else q).shape[2]),
            q,
            *(k, v, self.bias, *self.mixers, *tensors),
            *steps(q)[:3],
            *steps(k)[:3],
            *steps(v)[:3],
            *steps(self.bias),
            q.shape[2],
            k.shape[2],
            *more,
            H=q.shape[1],
            D=q.shape[-1],
            E=v.shape[-1],
            SCALE=how.scale,
            DIAGONAL=how.diagonal,
            LAYER=how.eps is not None,
            EPS=how.eps or 0.0,
            HP=padded(q.shape[1]),
            DP=padded(q.shape[-1]),
            EP=padded(v.shape[-1]),
            BN=16 if of_keys else self.rows,
            BM=self.rows if of_keys else 16,
            # weights are in float32 whatever the queries are in; tensor cores round to 11 bits
            MIXING="tf32" if q.element_size() == 2 else precision(),
            num_warps=8,
            num_stages=1,
        )


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: _How,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        *mixers: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        call = _Call(how, readable(q), readable(k), readable(v), bias, mixers)
        (B, h, N, _), wide = q.shape, sum_dtype(q)
        programs = call.programs(N)
        lse = q.new_empty(B, h, N, dtype=wide)
        out = v.new_empty(B, N, h, v.shape[-1]).transpose(1, 2)
        products = q.new_empty(programs, h, h, dtype=wide) if how.moments else None
        call.run(sum_kernel, (lse,), ())
        call.run(forward_kernel, (lse, out, products), steps(out)[:3])
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, *mixers, lse)
        return out, None if products is None else products.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_products: Tensor | None) -> tuple[Any, ...]:
        how: _How = ctx.how
        *inputs, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or batched(grad, of_products):
            grads = (grad, of_products)
            return (None, *gradients_of(partial(_plain, how), inputs, needs, grads))
        q, k, v, bias, *mixers = inputs
        call = _Call(how, readable(q), readable(k), readable(v), bias, mixers)
        (B, h, N, _), wide = q.shape, sum_dtype(q)
        grad = v.new_zeros(B, h, N, v.shape[-1]) if grad is None else readable(grad)
        # each product of two heads stands in the sum twice
        both = None if of_products is None else (of_products + of_products.T).contiguous()
        programs = call.programs(N)
        delta, of_queries = lse.new_empty(lse.shape), q.new_empty(q.shape)
        of_theta = q.new_empty(programs, h, h, dtype=wide)
        vectors = q.new_empty(programs, 3, h, dtype=wide) if how.eps is not None else None
        tensors = (lse, grad, both, delta)
        steps_of = steps(grad)[:3]
        call.run(query_kernel, (*tensors, of_queries, of_theta, vectors), steps_of)
        of_mixers = [of_theta.sum(0), *(vectors.sum(0) if vectors is not None else [None] * 3)]
        of_keys = of_values = None
        if needs[1] or needs[2]:
            of_keys, of_values = k.new_empty(B, *k.shape[1:]), v.new_empty(v.shape)
            call.run(key_kernel, (*tensors, of_keys, of_values), steps_of)
            of_keys = of_keys.sum_to_size(k.shape)
        found = zip(of_mixers, mixers, strict=True)
        given = [None if t is None else each for each, t in found]
        return None, of_queries, of_keys, of_values, None, *given


def _plain(
    how: _How,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    theta: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    offset: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same with whole maps, by operations that have gradients of gradients."""
    given, wide = v.dtype, sum_dtype(q)
    s = q.to(wide) @ k.to(wide).transpose(-2, -1) * how.scale
    if bias is not None:
        s = s + bias
    if how.diagonal is not None:
        n, m = (torch.arange(size, device=s.device) for size in s.shape[-2:])
        s = s.masked_fill(n[:, None] + how.diagonal == m, torch.finfo(wide).min)
    maps, products = s.softmax(-1), None
    if how.eps is None:
        maps = maps - 1 / maps.shape[-1]
        if how.moments:
            products = torch.einsum("bhnm,bgnm->hg", maps, maps)
    maps = torch.einsum("hg,bhnm->bnmg", theta, maps)
    if how.eps is not None:
        maps = maps if added is None else maps + added
        maps = torch.nn.functional.layer_norm(maps, theta.shape[:1], weight, offset, how.eps)
    return (maps.permute(0, 3, 1, 2) @ v.to(wide)).to(given), products


def attention(
    q: Float[Tensor, "*batch h N d"],
    k: Float[Tensor, "*keys h M d"],
    v: Float[Tensor, "*batch h M e"],
    *,
    theta: Float[Tensor, "h h"],
    layer: tuple[Tensor | None, Tensor, Tensor, float] | None = None,
    moments: bool = False,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    diagonal: int | None = None,
) -> tuple[Float[Tensor, "*batch h N e"], Tensor | None]:
    r"""Compute :math:`\Theta^\top (\mathrm{softmax}(s\,Q K^\top + b) - 1/M)\,V` by kernels.

    With ``layer``, a bias of the mixed maps (or None), weight, bias and epsilon, it is
    :math:`\mathrm{LayerNorm}(\Theta^\top \mathrm{softmax}(\dots))\,V` over the heads. ``moments``
    asks for the sums over all entries of the products of two heads, ``[h, h]``, before Θ. The
    additive bias b gets no gradient. Gradients of gradients form the whole maps. float64 is
    refused on a GPU.
    """
    check_dtype(q)
    wide, lead = sum_dtype(q), q.shape[:-3]
    if isinstance(scale, Tensor):
        q, scale = q * scale.to(q.dtype), 1.0
    axes = Axes(lead, q.shape[-3], 0)
    # keys of windows are copied for each image; those of all images, and of each, are not
    keys = k[None] if k.ndim == 3 else axes.split(k.expand(*lead, *k.shape[-3:]))
    added, weight, offset, eps = layer if layer is not None else (None, None, None, None)
    mixers = (None if t is None else t.to(wide) for t in (theta, added, weight, offset))
    out, products = _Mixed.apply(
        _How(scale=scale, diagonal=diagonal, eps=eps, moments=moments),
        axes.split(q),
        keys.to(q.dtype),
        axes.split(v.to(q.dtype)),
        None if bias is None else axes.bias(bias),
        *(None if t is None else t.contiguous() for t in mixers),
    )
    return axes.joined(out), products
