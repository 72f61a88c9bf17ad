# SPDX-License-Identifier: Apache-2.0
"""The same function as Triton kernels, a program a block of neurons; not yet measured on a GPU.

The backward kernel leaves the potentials in the room of the result, which it reads again on its
way back: nothing but the currents is saved between the passes. With ``TRITON_INTERPRET=1``, set
before this module is first imported, the kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from keymix.ops.neuron.again import again
from keymix.ops.neuron.layout import Dynamics, Rows, batched, held_dtype

_BLOCK = 512
_HELD = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _coefficient(  # type: ignore[no-untyped-def]
    pointer, at, inside, NUMBER: tl.constexpr, EACH: tl.constexpr, HELD: tl.constexpr
):
    # a number goes in as a constant: a tensor of it would be a launch or a copy for each call
    if pointer is None:
        return tl.full(at.shape, NUMBER, HELD)
    elif EACH:  # noqa: RET505 # Triton wants all branches named
        return tl.load(pointer + at, mask=inside, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _charge(v, x, keep, gain, rest):  # type: ignore[no-untyped-def]
    # rounded as in the reference: the kernels are built without fused multiply-adds
    return rest + keep * (v - rest) + gain * x


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
    HELD: tl.constexpr,
    STEPS: tl.constexpr,
    HARD: tl.constexpr,
    STARTS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    count, x_stride = tl.cast(count, tl.int64), tl.cast(x_stride, tl.int64)  # T count is larger
    keep = _coefficient(keep_ptr, at, inside, KEEP, KEEP_EACH, HELD)
    gain = _coefficient(gain_ptr, at, inside, GAIN, GAIN_EACH, HELD)
    threshold = tl.full([BLOCK], THRESHOLD, HELD)
    rest = tl.full([BLOCK], REST, HELD)
    v = tl.load(v_ptr + at, mask=inside, other=0.0) if STARTS else rest
    for t in range(STEPS):
        x = tl.load(x_ptr + t * x_stride + at, mask=inside, other=0.0).to(v.dtype)
        h = _charge(v, x, keep, gain, rest)
        fired = h >= threshold
        spikes = tl.where(fired, 1.0, 0.0).to(spikes_ptr.dtype.element_ty)
        tl.store(spikes_ptr + t * count + at, spikes, mask=inside)
        v = tl.where(fired, rest, h) if HARD else h - tl.where(fired, threshold, 0.0)
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
    HELD: tl.constexpr,
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
    keep = _coefficient(keep_ptr, at, inside, KEEP, KEEP_EACH, HELD)
    gain = _coefficient(gain_ptr, at, inside, GAIN, GAIN_EACH, HELD)
    threshold = tl.full([BLOCK], THRESHOLD, HELD)
    rest = tl.full([BLOCK], REST, HELD)
    stretch = tl.full([BLOCK], STRETCH, HELD)
    peak = tl.full([BLOCK], PEAK, HELD)
    start = tl.load(v_ptr + at, mask=inside, other=0.0) if STARTS else rest
    v = start
    for t in range(STEPS):
        x = tl.load(x_ptr + t * x_stride + at, mask=inside, other=0.0).to(v.dtype)
        h = _charge(v, x, keep, gain, rest)
        tl.store(room_ptr + t * count + at, h, mask=inside)
        if HARD:
            v = tl.where(h >= threshold, rest, h)
        else:
            v = h - tl.where(h >= threshold, threshold, 0.0)
    tl.debug_barrier()  # what was stored is loaded again
    if LAST:
        carry = tl.load(last_ptr + at, mask=inside, other=0.0)
    else:
        carry = tl.zeros([BLOCK], dtype=HELD)
    grad_keep = tl.zeros([BLOCK], dtype=HELD)
    grad_gain = tl.zeros([BLOCK], dtype=HELD)
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
                if HARD:
                    before = tl.where(before >= threshold, rest, before)
                else:
                    before = before - tl.where(before >= threshold, threshold, 0.0)
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


def _learned(value: float | Tensor, rows: Rows, x: Tensor) -> tuple[Tensor | None, float, bool]:
    """Give a coefficient as a tensor or a number, and say whether each neuron has its own."""
    if not isinstance(value, Tensor):
        return None, float(value), False
    flat = rows.coefficient(value, held_dtype(x))
    return flat.contiguous(), 0.0, flat.ndim > 0


def _on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Let Triton, which launches on the current device, launch on the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _dense(rows: Rows, x: Tensor) -> Tensor:
    """Lay steps out as rows whose entries lie side by side."""
    flat = rows.steps(x)
    return flat if flat.shape[1] <= 1 or flat.stride(1) == 1 else flat.contiguous()


def _start(rows: Rows, v: Tensor | None, x: Tensor) -> Tensor | None:
    return None if v is None else rows.flat(v.to(held_dtype(x)).expand(rows.shape)).contiguous()


def _gradients(
    x: Tensor,
    v: Tensor | None,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    grads: Tensor | None,
    last: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, v, keep and gain; of the last three, those that are wanted."""
    rows = Rows.of(x)
    flat, start, held = _dense(rows, x), _start(rows, v, x), held_dtype(x)
    grads = _dense(rows, torch.zeros_like(x) if grads is None else grads)
    keeps, gains = _learned(keep, rows, x), _learned(gain, rows, x)
    result = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    room = result if x.dtype == held else torch.empty_like(result, dtype=held)
    made = [
        torch.zeros(rows.count, dtype=held, device=x.device) if need else None for need in wanted
    ]
    if rows.count:
        with _on_device_of(x):
            _backward_kernel[(triton.cdiv(rows.count, _BLOCK),)](
                flat,
                start,
                keeps[0],
                gains[0],
                grads,
                None if last is None else rows.flat(last).contiguous(),
                room,
                result,
                *made,
                rows.count,
                flat.stride(0),
                grads.stride(0),
                KEEP=keeps[1],
                GAIN=gains[1],
                KEEP_EACH=keeps[2],
                GAIN_EACH=gains[2],
                THRESHOLD=float(how.v_threshold),
                REST=float(how.rest),
                STRETCH=how.surrogate.stretch,
                PEAK=how.surrogate.peak,
                HELD=_HELD[held_dtype(x)],
                STEPS=x.shape[0],
                HARD=how.v_reset is not None,
                DETACH=how.detach_reset,
                SIGMOID=how.surrogate.name == "sigmoid",
                STARTS=v is not None,
                LAST=last is not None,
                GRAD_V=wanted[0],
                GRAD_KEEP=wanted[1],
                GRAD_GAIN=wanted[2],
                BLOCK=_BLOCK,
                enable_fp_fusion=False,
            )
    grad_v, *learned = made
    if grad_v is not None and v is not None:
        grad_v = rows.back(grad_v).sum_to_size(v.shape).to(v.dtype)
    grad_keep, grad_gain = (
        rows.coefficient_back(grad if value.numel() > 1 else grad.sum(), value)
        if grad is not None and isinstance(value, Tensor)
        else None
        for grad, value in zip(learned, (keep, gain), strict=True)
    )
    return rows.back(result), grad_v, grad_keep, grad_gain


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        v: Tensor | None,
        keep: float | Tensor,
        gain: float | Tensor,
        how: Dynamics,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows = Rows.of(x)
        tensors = [value if isinstance(value, Tensor) else None for value in (x, v, keep, gain)]
        ctx.save_for_backward(*tensors)
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in (keep, gain)]
        ctx.how = how
        ctx.set_materialize_grads(False)
        flat, start = _dense(rows, x), _start(rows, v, x)
        keeps, gains = _learned(keep, rows, x), _learned(gain, rows, x)
        spikes = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
        final = torch.empty(rows.count, dtype=held_dtype(x), device=x.device) if last else None
        if rows.count:
            with _on_device_of(x):
                _forward_kernel[(triton.cdiv(rows.count, _BLOCK),)](
                    flat,
                    start,
                    keeps[0],
                    gains[0],
                    spikes,
                    final,
                    rows.count,
                    flat.stride(0),
                    KEEP=keeps[1],
                    GAIN=gains[1],
                    KEEP_EACH=keeps[2],
                    GAIN_EACH=gains[2],
                    THRESHOLD=float(how.v_threshold),
                    REST=float(how.rest),
                    HELD=_HELD[held_dtype(x)],
                    STEPS=x.shape[0],
                    HARD=how.v_reset is not None,
                    STARTS=v is not None,
                    LAST=last,
                    BLOCK=_BLOCK,
                    enable_fp_fusion=False,
                )
        return rows.own(spikes), None if final is None else rows.own(final)

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None, last: Tensor | None) -> tuple[Any, ...]:
        x, v, *coefficients = ctx.saved_tensors
        keep, gain = (
            number if tensor is None else tensor
            for number, tensor in zip(ctx.numbers, coefficients, strict=True)
        )
        how, needs = ctx.how, ctx.needs_input_grad
        if torch.is_grad_enabled() or batched(grads, last):  # follow every operation
            return again(x, v, keep, gain, how, grads, last, needs)
        return (*_gradients(x, v, keep, gain, how, grads, last, needs[1:4]), None, None)


def integrate_and_fire(
    x: Tensor,
    v: Tensor | None,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the reference computes; arguments as those of the blocked path."""
    spikes, final = _Triton.apply(x, v, keep, gain, how, last)
    return spikes, final


def gradients(
    x: Tensor, grads: Tensor, keep: float | Tensor, gain: float | Tensor, how: Dynamics
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, keep and gain, from rest, without running for the spikes.

    Args:
        x: Input currents ``[T, ...]``.
        grads: Gradients of the spikes.
        keep: As the reference has it.
        gain: As the reference has it.
        how: The other options.
    """
    wanted = (False, isinstance(keep, Tensor), isinstance(gain, Tensor))
    grad_x, _, grad_keep, grad_gain = _gradients(x, None, keep, gain, how, grads, None, wanted)
    return grad_x, grad_keep, grad_gain
