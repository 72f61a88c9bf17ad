# SPDX-License-Identifier: Apache-2.0
"""The same function as Triton kernels, a program a block of neurons.

The backward kernel leaves the potentials in the room of the result, which it reads again on its
way back: nothing but the currents is saved between the passes. With ``TRITON_INTERPRET=1``, set
before this module is first imported, the kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from keymix.ops.neuron.autograd import Gradients, Neurons
from keymix.ops.neuron.reference import potential_dtype

_BLOCK = 512
_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _coefficient(  # type: ignore[no-untyped-def]
    pointer, at, inside, NUMBER: tl.constexpr, EACH: tl.constexpr, DTYPE: tl.constexpr
):
    # a number goes in as a constant: a tensor of it would be a launch or a copy for each call
    if pointer is None:
        return tl.full(at.shape, NUMBER, DTYPE)
    elif EACH:  # noqa: RET505 # Triton wants all branches named
        return tl.load(pointer + at, mask=inside, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _charge(v, x, keep, gain, rest):  # type: ignore[no-untyped-def]
    """Rounds as the reference does: the kernels are built without fused multiply-adds."""
    return rest + keep * (v - rest) + gain * x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _reset(h, threshold, rest, HARD: tl.constexpr):  # type: ignore[no-untyped-def]
    """From the potential before the reset to that after it."""
    fired = h >= threshold
    return tl.where(fired, rest, h) if HARD else h - tl.where(fired, threshold, 0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    v_ptr,
    keep_ptr,
    gain_ptr,
    spikes_ptr,
    final_ptr,
    count,
    x_stride,
    KEEP: tl.constexpr,
    GAIN: tl.constexpr,
    KEEP_EACH: tl.constexpr,
    GAIN_EACH: tl.constexpr,
    THRESHOLD: tl.constexpr,
    REST: tl.constexpr,
    DTYPE: tl.constexpr,
    STEPS: tl.constexpr,
    HARD: tl.constexpr,
    STARTS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    count, x_stride = tl.cast(count, tl.int64), tl.cast(x_stride, tl.int64)  # T count is larger
    keep = _coefficient(keep_ptr, at, inside, KEEP, KEEP_EACH, DTYPE)
    gain = _coefficient(gain_ptr, at, inside, GAIN, GAIN_EACH, DTYPE)
    threshold = tl.full([BLOCK], THRESHOLD, DTYPE)
    rest = tl.full([BLOCK], REST, DTYPE)
    v = tl.load(v_ptr + at, mask=inside, other=0.0) if STARTS else rest
    for t in range(STEPS):
        x = tl.load(x_ptr + t * x_stride + at, mask=inside, other=0.0).to(v.dtype)
        h = _charge(v, x, keep, gain, rest)
        spikes = tl.where(h >= threshold, 1.0, 0.0).to(spikes_ptr.dtype.element_ty)
        tl.store(spikes_ptr + t * count + at, spikes, mask=inside)
        v = _reset(h, threshold, rest, HARD)
    if LAST:
        tl.store(final_ptr + at, v, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0915 # a kernel is one function
    x_ptr,
    v_ptr,
    keep_ptr,
    gain_ptr,
    grads_ptr,
    last_ptr,
    room_ptr,
    grad_x_ptr,
    grad_v_ptr,
    grad_keep_ptr,
    grad_gain_ptr,
    count,
    x_stride,
    grads_stride,
    KEEP: tl.constexpr,
    GAIN: tl.constexpr,
    KEEP_EACH: tl.constexpr,
    GAIN_EACH: tl.constexpr,
    THRESHOLD: tl.constexpr,
    REST: tl.constexpr,
    STRETCH: tl.constexpr,
    PEAK: tl.constexpr,
    DTYPE: tl.constexpr,
    STEPS: tl.constexpr,
    HARD: tl.constexpr,
    DETACH: tl.constexpr,
    SIGMOID: tl.constexpr,
    STARTS: tl.constexpr,
    LAST: tl.constexpr,
    GRAD_V: tl.constexpr,
    GRAD_KEEP: tl.constexpr,
    GRAD_GAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    count, x_stride = tl.cast(count, tl.int64), tl.cast(x_stride, tl.int64)  # T count is larger
    grads_stride = tl.cast(grads_stride, tl.int64)
    keep = _coefficient(keep_ptr, at, inside, KEEP, KEEP_EACH, DTYPE)
    gain = _coefficient(gain_ptr, at, inside, GAIN, GAIN_EACH, DTYPE)
    threshold = tl.full([BLOCK], THRESHOLD, DTYPE)
    rest = tl.full([BLOCK], REST, DTYPE)
    stretch = tl.full([BLOCK], STRETCH, DTYPE)
    peak = tl.full([BLOCK], PEAK, DTYPE)
    start = tl.load(v_ptr + at, mask=inside, other=0.0) if STARTS else rest
    v = start
    for t in range(STEPS):
        x = tl.load(x_ptr + t * x_stride + at, mask=inside, other=0.0).to(v.dtype)
        h = _charge(v, x, keep, gain, rest)
        tl.store(room_ptr + t * count + at, h, mask=inside)
        v = _reset(h, threshold, rest, HARD)
    tl.debug_barrier()  # what was stored is loaded again
    if LAST:
        carry = tl.load(last_ptr + at, mask=inside, other=0.0)
    else:
        carry = tl.zeros([BLOCK], dtype=DTYPE)
    grad_keep = tl.zeros([BLOCK], dtype=DTYPE)
    grad_gain = tl.zeros([BLOCK], dtype=DTYPE)
    for i in range(STEPS):
        t = STEPS - 1 - i
        h = tl.load(room_ptr + t * count + at, mask=inside, other=0.0)
        u = stretch * (h - threshold)
        if SIGMOID:
            s = 1 / (1 + tl.exp(-u))
            slope = peak * s * (1 - s)
        else:
            slope = peak / (1 + u * u)
        g = tl.load(grads_ptr + t * grads_stride + at, mask=inside, other=0.0).to(h.dtype) * slope
        if HARD:
            if not DETACH:
                g += carry * slope * (rest - h)
            g += tl.where(h >= threshold, 0.0, carry)
        else:
            if not DETACH:
                g -= carry * slope * threshold
            g += carry
        if GRAD_KEEP:
            before = start
            if t > 0:
                before = tl.load(room_ptr + (t - 1) * count + at, mask=inside, other=0.0)
                before = _reset(before, threshold, rest, HARD)
            grad_keep += g * (before - rest)
        if GRAD_GAIN:
            x = tl.load(x_ptr + t * x_stride + at, mask=inside, other=0.0).to(h.dtype)
            grad_gain += g * x
        # the potential of this step is not needed any more where the room is the result's
        tl.store(
            grad_x_ptr + t * count + at,
            (gain * g).to(grad_x_ptr.dtype.element_ty),
            mask=inside,
        )
        carry = keep * g
    if GRAD_V:
        tl.store(grad_v_ptr + at, carry, mask=inside)
    if GRAD_KEEP:
        tl.store(grad_keep_ptr + at, grad_keep, mask=inside)
    if GRAD_GAIN:
        tl.store(grad_gain_ptr + at, grad_gain, mask=inside)


def _dense(row: Tensor) -> Tensor:
    """Make the entries of ``[..., n]`` adjacent in memory."""
    return row if row.shape[-1] <= 1 or row.stride(-1) == 1 else row.contiguous()


def _launch(kernel: Any, neurons: Neurons, *more: Tensor | int | None, **options: Any) -> None:
    """Run a kernel on all neurons, its further tensors and strides after x, v, keep and gain."""
    x, how, coefficients = neurons.x, neurons.how, (neurons.keep, neurons.gain)
    if not x.shape[1]:
        return
    learned = [v.contiguous() if isinstance(v, Tensor) else None for v in coefficients]
    numbers = [0.0 if isinstance(v, Tensor) else v for v in coefficients]
    each = [pointer is not None and pointer.ndim > 0 for pointer in learned]
    # Triton launches on the current device
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        kernel[(triton.cdiv(x.shape[1], _BLOCK),)](
            x,
            None if neurons.v is None else neurons.v.contiguous(),
            *learned,
            *more,
            KEEP=numbers[0],
            GAIN=numbers[1],
            KEEP_EACH=each[0],
            GAIN_EACH=each[1],
            THRESHOLD=float(how.v_threshold),
            REST=float(how.rest),
            DTYPE=_DTYPES[potential_dtype(x)],
            STEPS=x.shape[0],
            HARD=how.v_reset is not None,
            STARTS=neurons.v is not None,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
            **options,
        )


def forward(neurons: Neurons, last: bool) -> tuple[Tensor, Tensor | None]:
    """Spikes ``[T, n]``, and the last potential ``[n]`` if wanted."""
    x = _dense(neurons.x)
    count = x.shape[1]
    spikes = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(count, dtype=potential_dtype(x), device=x.device) if last else None
    neurons = replace(neurons, x=x)
    _launch(_forward_kernel, neurons, spikes, final, count, x.stride(0), LAST=last)
    return spikes, final


def backward(
    neurons: Neurons, grads: Tensor, last: Tensor | None, wanted: Sequence[bool]
) -> Gradients:
    """Gradients of x, v, keep and gain; the last three where wanted."""
    x, grads, how = _dense(neurons.x), _dense(grads), neurons.how
    count, dtype = x.shape[1], potential_dtype(x)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    room = grad_x if x.dtype == dtype else torch.empty_like(grad_x, dtype=dtype)
    found = [torch.zeros(count, dtype=dtype, device=x.device) if each else None for each in wanted]
    _launch(
        _backward_kernel,
        replace(neurons, x=x),
        grads,
        None if last is None else last.contiguous(),
        room,
        grad_x,
        *found,
        count,
        x.stride(0),
        grads.stride(0),
        STRETCH=how.surrogate.stretch,
        PEAK=how.surrogate.peak,
        DETACH=how.detach_reset,
        SIGMOID=how.surrogate.name == "sigmoid",
        LAST=last is not None,
        GRAD_V=wanted[0],
        GRAD_KEEP=wanted[1],
        GRAD_GAIN=wanted[2],
    )
    grad_v, *learned = found
    grad_keep, grad_gain = (
        grad if grad is None or (isinstance(value, Tensor) and value.ndim) else grad.sum()
        for grad, value in zip(learned, (neurons.keep, neurons.gain), strict=True)
    )
    return grad_x, grad_v, grad_keep, grad_gain
