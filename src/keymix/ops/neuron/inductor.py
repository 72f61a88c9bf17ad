# SPDX-License-Identifier: Apache-2.0
"""The same function compiled by PyTorch's inductor: one kernel forward, one backward.

One compilation serves a number of steps, a dtype and a kind of reset; thresholds, leaks and sizes
go in as tensors and free sizes. It takes some ten seconds the first time, and a C++ compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from keymix.ops.neuron.again import again
from keymix.ops.neuron.layout import Dynamics, Rows, batched, held_dtype
from keymix.ops.neuron.surrogate import SHAPES
from keymix.ops.own_code import own_code


def _steps(
    x: Tensor, v: Tensor | None, c: Any, *, hard: bool
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Potentials before each step and before each reset, and the last one after it."""
    keep, gain, threshold, rest, _, _ = c
    v = rest.expand(x.shape[1]) if v is None else v
    before, charged = [], []
    for t in range(x.shape[0]):
        before.append(v)
        h = rest + keep * (v - rest) + gain * x[t].to(v.dtype)
        charged.append(h)
        v = torch.where(h >= threshold, rest, h) if hard else h - threshold * (h >= threshold)
    return before, charged, v


def _forward(
    x: Tensor, v: Tensor | None, c: Any, *, hard: bool, last: bool
) -> tuple[Tensor, Tensor | None]:
    _, charged, final = _steps(x, v, c, hard=hard)
    spikes = torch.stack([h >= c[2] for h in charged]).to(x.dtype)
    return spikes, final.clone() if last else None


def _backward(
    x: Tensor,
    v: Tensor | None,
    c: Any,
    grads: Tensor,
    last: Tensor | None,
    *,
    hard: bool,
    detach: bool,
    bell: Callable[[Tensor], Tensor],
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    keep, gain, threshold, rest, stretch, peak = c
    before, charged, _ = _steps(x, v, c, hard=hard)
    carry, found = last, []
    grad_keep, grad_gain = torch.zeros_like(before[0]), torch.zeros_like(before[0])
    for t in range(x.shape[0] - 1, -1, -1):
        h = charged[t]
        slope = peak * bell(stretch * (h - threshold))
        g = grads[t].to(h.dtype) * slope
        if carry is not None:
            if not detach:
                g = g + carry * slope * (rest - h if hard else -threshold)
            g = g + (torch.where(h >= threshold, 0.0, carry) if hard else carry)
        found.append((gain * g).to(x.dtype))
        grad_keep = grad_keep + g * (before[t] - rest)
        grad_gain = grad_gain + g * x[t].to(h.dtype)
        carry = keep * g
    return (
        torch.stack(found[::-1]),
        carry if wanted[0] else None,
        (grad_keep if keep.ndim else grad_keep.sum()) if wanted[1] else None,
        (grad_gain if gain.ndim else grad_gain.sum()) if wanted[2] else None,
    )


@functools.cache
def _compiled(template: Callable[..., Any], key: tuple[Any, ...], **options: Any) -> Any:
    """Compile one case."""
    own = own_code(template, f"{template.__name__}_{abs(hash(key))}")
    own.__kwdefaults__ = options
    return torch.compile(own, fullgraph=True, dynamic=True)


def _free(value: Tensor | None, axis: int) -> None:
    if value is not None and value.ndim > axis and value.shape[axis] > 1:
        torch._dynamo.mark_dynamic(value, axis)


def _constants(
    x: Tensor, rows: Rows, keep: float | Tensor, gain: float | Tensor, how: Dynamics
) -> tuple[Tensor, ...]:
    held = held_dtype(x)
    numbers = (how.v_threshold, how.rest, how.surrogate.stretch, how.surrogate.peak)
    learned = [
        rows.coefficient(each, held)
        if isinstance(each, Tensor)
        else torch.tensor(each, dtype=held, device=x.device)
        for each in (keep, gain)
    ]
    return (*learned, *(torch.tensor(each, dtype=held, device=x.device) for each in numbers))


class _Inductor(torch.autograd.Function):
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
        ctx.how, ctx.rows = how, rows
        ctx.set_materialize_grads(False)
        inputs = _inputs(x, v, keep, gain, how, rows)
        options = {"hard": how.v_reset is not None, "last": last}
        spikes, final = _compiled(_forward, _key(inputs), **options)(*inputs)
        return rows.own(spikes), None if final is None else rows.own(final)

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None, last: Tensor | None) -> tuple[Any, ...]:
        x, v, *coefficients = ctx.saved_tensors
        keep, gain = (
            number if tensor is None else tensor
            for number, tensor in zip(ctx.numbers, coefficients, strict=True)
        )
        how, rows, needs = ctx.how, ctx.rows, ctx.needs_input_grad
        if torch.is_grad_enabled() or batched(grads, last):  # follow every operation
            return again(x, v, keep, gain, how, grads, last, needs)
        inputs = _inputs(x, v, keep, gain, how, rows)
        grads = torch.zeros_like(x) if grads is None else grads
        flat, after = rows.steps(grads), None if last is None else rows.flat(last)
        _free(flat, 1)
        _free(after, 0)
        run = _compiled(
            _backward,
            (*_key(inputs), after is None),
            hard=how.v_reset is not None,
            detach=how.detach_reset,
            bell=SHAPES[how.surrogate.name].bell,
            wanted=tuple(needs[1:4]),
        )
        with torch.no_grad():
            grad_x, grad_v, grad_keep, grad_gain = run(*inputs, flat, after)
        return (
            rows.back(grad_x),
            None if grad_v is None else rows.back(grad_v).sum_to_size(v.shape).to(v.dtype),
            None if grad_keep is None else rows.coefficient_back(grad_keep, keep),
            None if grad_gain is None else rows.coefficient_back(grad_gain, gain),
            None,
            None,
        )


def _inputs(
    x: Tensor,
    v: Tensor | None,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    rows: Rows,
) -> tuple[Any, ...]:
    """Flatten all tensors and mark the number of neurons as free."""
    flat = rows.steps(x.detach())
    start = None
    if v is not None:
        start = rows.flat(v.detach().to(held_dtype(x)).expand(rows.shape)).contiguous()
    constants = _constants(x, rows, keep, gain, how)
    _free(flat, 1)
    for each in (start, *constants[:2]):
        _free(each, 0)
    return flat, start, constants


def _key(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, v, constants = inputs
    return (x.shape[0], x.dtype, x.device.type, v is None, *(each.ndim for each in constants[:2]))


def cannot_run(device: torch.device) -> str | None:
    """Say why nothing can be compiled for a device; None if it can."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler; install one (g++) or name it in the variable CXX"
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "PyTorch finds no Triton that compiles for this GPU"
    else:
        return f"it is for CPU and CUDA, not {device.type!r}"
    return None


def integrate_and_fire(
    x: Tensor,
    v: Tensor | None,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the reference computes; arguments as those of the blocked path."""
    spikes, final = _Inductor.apply(x, v, keep, gain, how, last)
    return spikes, final
