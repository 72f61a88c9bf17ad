# SPDX-License-Identifier: Apache-2.0
"""Products of queries, keys and values that keep spikes in bytes for the backward pass.

Products of spikes count them: what counts at most 16384 is kept in two bytes, and neurons' currents
are made of the counts again. What is not known to be spikes is kept as it is where bytes do not
hold it exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from keymix.ops.neuron.autograd import Coefficient, save_coefficients, saved_coefficients
from keymix.ops.neuron.multi_step import gradients, integrate_and_fire
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.spikes.packed import mark_whole, pack, whole_to
from keymix.ops.spikes.recompute import refuse_unkept

_COUNTS = 1 << 14  # which two bytes hold, however floats of few bits round it


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``[T, *, N, h, d]`` to ``[T, *, h, N, d]``, as products of matrices take it."""
    return x.transpose(-3, -2).to(dtype, memory_format=torch.contiguous_format)


def attended(heads: Iterable[Tensor], linear: bool) -> tuple[Tensor, Tensor]:
    """Multiply q, k and v ``[T, *, h, N, d]``: the first of the two products, and that of all."""
    q, k, v = heads
    keys = k.transpose(-2, -1)  # .mT is not known to exporters
    first = keys @ v if linear else q @ keys
    return first, q @ first if linear else first @ v


def _attended_back(
    grad: Tensor, heads: Iterable[Tensor], first: Tensor, linear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of their product."""
    q, k, v = heads
    if linear:
        through = q.mT @ grad
        return grad @ first.mT, v @ through.mT, k @ through
    through = grad @ v.mT
    return through @ k, through.mT @ q, first.mT @ grad


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        linear: bool,
        keep: Coefficient,
        gain: Coefficient,
        how: Dynamics,
        backend: str,
    ) -> Tensor:
        ctx.scale, ctx.linear, ctx.how, ctx.backend = scale, linear, how, backend
        first, counts = attended((_heads_first(each, q.dtype) for each in (q, k, v)), linear)
        # the largest numbers that the two products may hold, if those of all three are known
        most = [whole_to(each) for each in (q, k, v)]
        tokens, width = q.shape[-3], q.shape[-1]
        bound = tokens * width
        for each in most:
            bound = _COUNTS + 1 if each is None else bound * max(each, 1)
        small = torch.int16 if bound <= _COUNTS else q.dtype
        ctx.save_for_backward(
            *(pack(each) for each in (q, k, v)),
            *(each.to(small) for each in (first, counts)),
            *save_coefficients(ctx, keep, gain),
        )
        currents = counts.mul_(scale) if counts.dtype != small else counts * scale
        spikes, _ = integrate_and_fire(
            currents, keep=keep, gain=gain, how=how, backend=backend, last=False
        )
        return spikes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_unkept(grad)
        q, k, v, first, counts, *tensors = ctx.saved_tensors  # once: checkpoints give them once
        keep, gain = saved_coefficients(ctx, tensors)
        dtype = grad.dtype
        grad, grad_keep, grad_gain = gradients(
            *(counts.to(dtype) * ctx.scale, grad),
            **{"keep": keep, "gain": gain, "how": ctx.how, "backend": ctx.backend},
        )
        found = _attended_back(
            grad.mul_(ctx.scale),
            (_heads_first(each, dtype) for each in (q, k, v)),
            first.to(dtype),
            ctx.linear,
        )
        needs = ctx.needs_input_grad
        heads = (each.transpose(-3, -2) for each in found)
        return (
            *(each if need else None for each, need in zip(heads, needs[:3], strict=True)),
            *(None, None),
            grad_keep if needs[5] else None,
            grad_gain if needs[6] else None,
            *(None, None),
        )


def self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    linear: bool,
    keep: Coefficient,
    gain: Coefficient,
    how: Dynamics,
    backend: str,
) -> Tensor:
    """Return the spikes ``[T, *, h, N, d]`` of neurons whose currents are ``Q K^T V scale``.

    q, k and v are ``[T, *, N, h, d]``; ``linear`` takes K^T V first, else it is Q K^T. keep, gain,
    how and backend are those of ``ops/neuron/multi_step.py``. Gradients of gradients are refused.
    """
    out: Tensor = _Attention.apply(q, k, v, scale, linear, keep, gain, how, backend)
    mark_whole(out)
    return out


class _Coincidences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(pack(q), pack(k))
        return (q * k).sum(-3, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_unkept(grad)
        q, k = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad
        return (
            grad * k.to(grad.dtype) if needs_q else None,
            grad * q.to(grad.dtype) if needs_k else None,
        )


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(mask, pack(values))
        return mask * values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_unkept(grad)
        mask, values = ctx.saved_tensors
        needs_mask, needs_values = ctx.needs_input_grad
        return (
            (grad * values.to(grad.dtype)).sum(-3, keepdim=True) if needs_mask else None,
            grad * mask if needs_values else None,
        )


def coincidences(q: Tensor, k: Tensor) -> Tensor:
    """Sum the products of ``[T, *, N, h, d]`` over the tokens, ``[T, *, 1, h, d]``."""
    out: Tensor = _Coincidences.apply(q, k)
    return out


def masked(mask: Tensor, values: Tensor) -> Tensor:
    """Multiply values ``[T, *, N, h, d]`` by a mask ``[T, *, 1, h, d]``."""
    out: Tensor = _Masked.apply(mask, values)
    marks = whole_to(mask), whole_to(values)
    if marks[0] is not None and marks[1] is not None:
        mark_whole(out, marks[0] * marks[1])
    return out
