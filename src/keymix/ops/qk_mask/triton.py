# SPDX-License-Identifier: Apache-2.0
"""The same function from the queries' currents on as Triton kernels; not yet measured on a GPU.

A program takes some sums, ``[T]`` each, and all that is summed: a head's channels of a token, or
an image's tokens of a channel. Queries, sums and mask stay in registers; the sums alone are
stored, for the backward pass. Both layers of neurons have the same leak, reset and surrogate, and
numbers for keep and gain. With ``TRITON_INTERPRET=1``, set before this module is first imported,
the kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from keymix.errors import UserError
from keymix.ops.neuron.reference import potential_dtype
from keymix.ops.neuron.triton import DTYPES, charge, reset
from keymix.ops.qk_mask.reference import Neuron
from keymix.ops.tracing import batched

_TILE = 2048  # numbers of a step that a program holds at once


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _at(tile, t, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row t of a tile ``[steps, sums]`` of registers, which cannot be indexed."""
    here = tl.arange(0, STEPS)[:, None] == t
    return tl.sum(tl.where(here, tile, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _put(tile, t, row, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a row to row t of a tile."""
    here = tl.arange(0, STEPS)[:, None] == t
    return tile + tl.where(here, row[None, :], 0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _slope(h, threshold, stretch, peak, SIGMOID: tl.constexpr):  # type: ignore[no-untyped-def]
    u = stretch * (h - threshold)
    if SIGMOID:
        s = 1 / (1 + tl.exp(-u))
        return peak * s * (1 - s)
    else:  # noqa: RET505 # Triton wants all branches named
        return peak / (1 + u * u)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _before_reset(  # type: ignore[no-untyped-def]
    grad, carry, h, threshold, rest, slope, HARD: tl.constexpr, DETACH: tl.constexpr
):
    """Gradient of a potential from those of its spike and of the potential after the reset."""
    g = grad * slope
    if HARD:
        if not DETACH:
            g += carry * slope * (rest - h)
        g += tl.where(h >= threshold, 0.0, carry)
    else:
        if not DETACH:
            g -= carry * slope * threshold
        g += carry
    return g


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    keys_ptr,
    sums_ptr,
    masked_ptr,
    groups,
    across,
    inner,
    KEEP: tl.constexpr,
    GAIN: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ATTENTION: tl.constexpr,
    REST: tl.constexpr,
    DTYPE: tl.constexpr,
    STEPS: tl.constexpr,
    ROOM: tl.constexpr,
    HARD: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)
    groups, across = tl.cast(groups, tl.int64), tl.cast(across, tl.int64)
    inner = tl.cast(inner, tl.int64)
    first = (group // inner) * across * inner + group % inner
    count = groups * across
    keep = tl.full([SUMS, BLOCK], KEEP, DTYPE)  # a bare number would have 32 bits
    gain = tl.full([SUMS, BLOCK], GAIN, DTYPE)
    threshold = tl.full([SUMS, BLOCK], THRESHOLD, DTYPE)
    rest = tl.full([SUMS, BLOCK], REST, DTYPE)
    sums = tl.zeros([ROOM, SUMS], dtype=DTYPE)
    for start in range(0, across, BLOCK):
        each = start + tl.arange(0, BLOCK)
        inside = (group < groups)[:, None] & (each < across)[None, :]
        at = first[:, None] + each[None, :] * inner
        v = rest
        for t in range(STEPS):
            x = tl.load(x_ptr + t * count + at, mask=inside, other=0.0).to(DTYPE)
            h = charge(v, x, keep, gain, rest)
            fired = tl.where((h >= threshold) & inside, 1.0, 0.0).to(DTYPE)
            sums = _put(sums, t, tl.sum(fired, 1), ROOM)
            v = reset(h, threshold, rest, HARD)
    keep = tl.full([SUMS], KEEP, DTYPE)
    gain = tl.full([SUMS], GAIN, DTYPE)
    threshold = tl.full([SUMS], ATTENTION, DTYPE)
    rest = tl.full([SUMS], REST, DTYPE)
    v = rest
    for t in range(STEPS):
        total = _at(sums, t, ROOM).to(x_ptr.dtype.element_ty)  # rounded as a sum of spikes is
        tl.store(sums_ptr + t * groups + group, total, mask=group < groups)
        h = charge(v, total.to(DTYPE), keep, gain, rest)
        mask = tl.where(h >= threshold, 1.0, 0.0).to(DTYPE)
        v = reset(h, threshold, rest, HARD)
        for start in range(0, across, BLOCK):
            each = start + tl.arange(0, BLOCK)
            inside = (group < groups)[:, None] & (each < across)[None, :]
            at = t * count + first[:, None] + each[None, :] * inner
            keys = tl.load(keys_ptr + at, mask=inside, other=0.0).to(DTYPE)
            masked = (keys * mask[:, None]).to(masked_ptr.dtype.element_ty)
            tl.store(masked_ptr + at, masked, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0915 # a kernel is one function
    x_ptr,
    keys_ptr,
    sums_ptr,
    grads_ptr,
    room_ptr,
    grad_x_ptr,
    grad_keys_ptr,
    groups,
    across,
    inner,
    KEEP: tl.constexpr,
    GAIN: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ATTENTION: tl.constexpr,
    REST: tl.constexpr,
    DTYPE: tl.constexpr,
    STEPS: tl.constexpr,
    ROOM: tl.constexpr,
    HARD: tl.constexpr,
    DETACH: tl.constexpr,
    SIGMOID: tl.constexpr,
    STRETCH: tl.constexpr,
    PEAK: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)
    groups, across = tl.cast(groups, tl.int64), tl.cast(across, tl.int64)
    inner = tl.cast(inner, tl.int64)
    first = (group // inner) * across * inner + group % inner
    count = groups * across
    keep = tl.full([SUMS], KEEP, DTYPE)
    gain = tl.full([SUMS], GAIN, DTYPE)
    threshold = tl.full([SUMS], ATTENTION, DTYPE)
    rest = tl.full([SUMS], REST, DTYPE)
    stretch = tl.full([SUMS], STRETCH, DTYPE)
    peak = tl.full([SUMS], PEAK, DTYPE)
    v = rest
    potentials = tl.zeros([ROOM, SUMS], dtype=DTYPE)
    wanted = tl.zeros([ROOM, SUMS], dtype=DTYPE)  # gradients of the mask, then of the sums
    for t in range(STEPS):
        total = tl.load(sums_ptr + t * groups + group, mask=group < groups, other=0.0).to(DTYPE)
        h = charge(v, total, keep, gain, rest)
        potentials = _put(potentials, t, h, ROOM)
        mask = tl.where(h >= threshold, 1.0, 0.0).to(DTYPE)
        v = reset(h, threshold, rest, HARD)
        for start in range(0, across, BLOCK):
            each = start + tl.arange(0, BLOCK)
            inside = (group < groups)[:, None] & (each < across)[None, :]
            at = t * count + first[:, None] + each[None, :] * inner
            grads = tl.load(grads_ptr + at, mask=inside, other=0.0).to(DTYPE)
            keys = tl.load(keys_ptr + at, mask=inside, other=0).to(DTYPE)
            wanted = _put(wanted, t, tl.sum(grads * keys, 1), ROOM)
            kept = (grads * mask[:, None]).to(grad_keys_ptr.dtype.element_ty)
            tl.store(grad_keys_ptr + at, kept, mask=inside)
    of_sums = tl.zeros([ROOM, SUMS], dtype=DTYPE)
    carry = tl.zeros([SUMS], dtype=DTYPE)
    for i in range(STEPS):
        t = STEPS - 1 - i
        h = _at(potentials, t, ROOM)
        slope = _slope(h, threshold, stretch, peak, SIGMOID)
        grad = _at(wanted, t, ROOM)
        g = _before_reset(grad, carry, h, threshold, rest, slope, HARD, DETACH)
        of_sums = _put(of_sums, t, gain * g, ROOM)
        carry = keep * g
    keep = tl.full([SUMS, BLOCK], KEEP, DTYPE)
    gain = tl.full([SUMS, BLOCK], GAIN, DTYPE)
    threshold = tl.full([SUMS, BLOCK], THRESHOLD, DTYPE)
    rest = tl.full([SUMS, BLOCK], REST, DTYPE)
    stretch = tl.full([SUMS, BLOCK], STRETCH, DTYPE)
    peak = tl.full([SUMS, BLOCK], PEAK, DTYPE)
    for start in range(0, across, BLOCK):
        each = start + tl.arange(0, BLOCK)
        inside = (group < groups)[:, None] & (each < across)[None, :]
        at = first[:, None] + each[None, :] * inner
        u = rest
        for t in range(STEPS):
            x = tl.load(x_ptr + t * count + at, mask=inside, other=0.0).to(DTYPE)
            h = charge(u, x, keep, gain, rest)
            tl.store(room_ptr + t * count + at, h, mask=inside)
            u = reset(h, threshold, rest, HARD)
        tl.debug_barrier()  # what was stored is loaded again
        after = tl.zeros([SUMS, BLOCK], dtype=DTYPE)
        for i in range(STEPS):
            t = STEPS - 1 - i
            h = tl.load(room_ptr + t * count + at, mask=inside, other=0.0)
            slope = _slope(h, threshold, stretch, peak, SIGMOID)
            grad = _at(of_sums, t, ROOM)[:, None]
            g = _before_reset(grad, after, h, threshold, rest, slope, HARD, DETACH)
            found = (gain * g).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + t * count + at, found, mask=inside)
            after = keep * g


def why_not(queries: Neuron, attention: Neuron) -> str | None:
    """Why two layers of neurons are not for these kernels; None if they are."""
    if any(isinstance(each, Tensor) for n in (queries, attention) for each in (n.keep, n.gain)):
        return "the neurons learn their time constant"
    alike = replace(attention.how, v_threshold=queries.how.v_threshold) == queries.how
    if not alike or (queries.keep, queries.gain) != (attention.keep, attention.gain):
        return "the neurons of queries and attention differ in more than their threshold"
    return None


def _launch(
    kernel: Any,
    x: Tensor,
    axis: int,
    queries: Neuron,
    attention: Neuron,
    *more: Tensor,
    **options: Any,
) -> None:
    if not x.numel():
        return
    steps, *_, tokens, heads, head_dim = x.shape
    across, inner = (head_dim, 1) if axis == -1 else (tokens, heads * head_dim)
    groups = x[0].numel() // across
    block = min(triton.next_power_of_2(across), 128)
    sums = max(_TILE // block, 1)
    # Triton launches on the current device
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        kernel[(triton.cdiv(groups, sums),)](
            x,
            *more,
            groups,
            across,
            inner,
            KEEP=queries.keep,
            GAIN=queries.gain,
            THRESHOLD=float(queries.how.v_threshold),
            ATTENTION=float(attention.how.v_threshold),
            REST=float(queries.how.rest),
            DTYPE=DTYPES[potential_dtype(x)],
            STEPS=steps,
            ROOM=triton.next_power_of_2(steps),
            HARD=queries.how.v_reset is not None,
            SUMS=sums,
            BLOCK=block,
            enable_fp_fusion=False,
            **options,
        )


def _in_bytes(keys: Tensor) -> Tensor:
    """Return keys as bytes where these hold them exactly, as they do spikes."""
    small = keys.to(torch.int8)
    return small if torch.equal(small.to(keys.dtype), keys) else keys


class _MaskedKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keys: Tensor, queries: Neuron, attention: Neuron, axis: int
    ) -> Tensor:
        x, keys = x.contiguous(), keys.contiguous()
        ctx.neurons, ctx.axis = (queries, attention), axis
        sums = x.sum(axis) if not x.numel() else torch.empty_like(x.select(axis, 0))
        masked = torch.empty_like(keys)
        _launch(_forward_kernel, x, axis, queries, attention, keys, sums, masked)
        ctx.save_for_backward(x, _in_bytes(keys), sums)
        return masked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or batched(grad):
            raise UserError(
                "backend='triton' of Q-K attention keeps too little for gradients of gradients and "
                "takes one gradient at a time; name another backend"
            )
        x, keys, sums = ctx.saved_tensors
        queries, attention = ctx.neurons
        grad = grad.contiguous()
        grad_x, grad_keys = torch.empty_like(x), torch.empty_like(grad)
        dtype = potential_dtype(x)
        room = grad_x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
        surrogate = queries.how.surrogate
        _launch(
            *(_backward_kernel, x, ctx.axis, queries, attention),
            *(keys, sums, grad, room, grad_x, grad_keys),
            DETACH=queries.how.detach_reset,
            SIGMOID=surrogate.name == "sigmoid",
            STRETCH=surrogate.stretch,
            PEAK=surrogate.peak,
        )
        return grad_x, grad_keys, None, None, None


def masked_keys(
    currents: Tensor, keys: Tensor, queries: Neuron, attention: Neuron, axis: int
) -> Tensor:
    """Compute what ``reference.py`` does; numbers ``[T, *, N, h, d]`` of both in one dtype.

    Gradients of gradients are refused, and neurons that :func:`why_not` names.
    """
    why = why_not(queries, attention)
    if why is not None:
        raise UserError(f"backend='triton' of Q-K attention cannot run here: {why}")
    out: Tensor = _MaskedKeys.apply(currents, keys, queries, attention, axis)
    return out
