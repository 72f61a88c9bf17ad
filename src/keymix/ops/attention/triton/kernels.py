# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention of each head by itself; :mod:`.attention` says what they share.

A program of the forward kernel takes a block of queries past all keys and keeps the running
maximum and sum of the softmax. The backward kernels form each tile of the map again: one sums over
keys for the queries, one over queries for keys and values, one for the additive bias.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

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
def forward_kernel(  # type: ignore[no-untyped-def]
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
    """Compute the output for a block of queries, and the logarithm of the softmax's sums."""
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
def query_kernel(  # type: ignore[no-untyped-def]
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
    for i in tl.static_range(TAPS):  # noqa: B007 # its type stays in the loops below
        sums = sums + (tl.zeros([BN, DP], dtype=DTYPE),)  # type: ignore[assignment, unused-ignore] # noqa: RUF005
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        s = _scores(
            q, k, shift, bias, n, m, N, M, W, q_n, k_m, bias_n, bias_m,
            D, SIDE, SCALE, DIAGONAL, DTYPE, LOWEST, PRECISION, DP,
        )  # fmt: skip
        values = _rows(v, m, m < M, v_m, E, EP)
        ds = _tile_gradients(
            s, dy, values, numbers, lse, delta, n, m, N, M, ACTIVATION, DIAGONAL, DTYPE, PRECISION
        )[2]
        ds = ds.to(k.dtype.element_ty)
        more = ()
        for i in tl.static_range(TAPS):
            keys = _rows(k + (FIRST + i) * D, m, m < M, k_m, D, DP)
            made = tl.dot(ds, keys, sums[i], input_precision=PRECISION, out_dtype=DTYPE)
            more = more + (made,)  # type: ignore[assignment, unused-ignore] # noqa: RUF005
        sums = more  # type: ignore[assignment, unused-ignore]
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
def key_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0915 # a kernel is one function
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
    for i in tl.static_range(TAPS):  # noqa: B007 # its type stays in the loops below
        sums = sums + (tl.zeros([BM, DP], dtype=DTYPE),)  # type: ignore[assignment, unused-ignore] # noqa: RUF005
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
                more = more + (made,)  # type: ignore[assignment, unused-ignore] # noqa: RUF005
            sums = more  # type: ignore[assignment, unused-ignore]
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
def bias_kernel(  # type: ignore[no-untyped-def]
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
        ds = _tile_gradients(
            s, dy, values, numbers, lse + (b * G + g) * N, delta + (b * G + g) * N,
            n, m, N, M, ACTIVATION, DIAGONAL, DTYPE, PRECISION,
        )[2]  # fmt: skip
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
