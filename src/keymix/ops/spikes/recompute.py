# SPDX-License-Identifier: Apache-2.0
"""A neuron behind a function of one large tensor: this tensor alone is kept for the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keymix.errors import UserError
from keymix.ops.neuron.autograd import save_coefficients, saved_coefficients
from keymix.ops.neuron.multi_step import gradients, integrate_and_fire
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.tracing import batched


def refuse_unkept(grad: Tensor) -> None:
    """Refuse a backward pass that is to be differentiated, or of many gradients at once."""
    what = None
    if torch.is_grad_enabled():
        what = "create_graph=True: a spiking step keeps too little for gradients of gradients"
    elif batched(grad):
        what = "is_grads_batched=True or vmap: a spiking step takes one gradient at a time"
    if what is not None:
        raise UserError(
            f"{what}; run the forward pass within keymix.layers.spiking_block.plain_steps()"
        )


@dataclass(frozen=True)
class Currents:
    """The function from the tensor that is kept to the neurons' currents.

    ``first`` computes it, and may count, as the running statistics of norms do. ``recompute``
    computes the same from the tensor, ``learned`` and ``constants``, and must not count. What is
    learned gets a gradient; constants get none, but may change until the backward pass.
    """

    first: Callable[[Tensor], Tensor]
    recompute: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
    learned: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        currents: Currents,
        how: Dynamics,
        backend: str,
        y: Tensor,
        keep: float | Tensor,
        gain: float | Tensor,
        *learned: Tensor,
    ) -> Tensor:
        ctx.recompute, ctx.how, ctx.backend, ctx.count = (
            currents.recompute,
            how,
            backend,
            len(learned),
        )
        coefficients = save_coefficients(ctx, keep, gain)
        ctx.save_for_backward(y, *coefficients, *learned, *currents.constants)
        spikes, _ = integrate_and_fire(
            currents.first(y), keep=keep, gain=gain, how=how, backend=backend, last=False
        )
        return spikes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_unkept(grad)
        y, *tensors = ctx.saved_tensors
        keep, gain = saved_coefficients(ctx, tensors[:2])
        learned, constants = tensors[2 : 2 + ctx.count], tensors[2 + ctx.count :]
        needs_y, needs_keep, needs_gain, *needs_learned = ctx.needs_input_grad[3:]
        needs = (needs_y, *needs_learned)
        with torch.enable_grad():
            leaves = [
                each.detach().requires_grad_(need)
                for each, need in zip((y, *learned), needs, strict=True)
            ]
            run = ctx.recompute(leaves[0], leaves[1:], constants)
        grad_run, grad_keep, grad_gain = gradients(
            run.detach(), grad, keep=keep, gain=gain, how=ctx.how, backend=ctx.backend
        )
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        found = iter(torch.autograd.grad(run, wanted, grad_run) if wanted else ())
        grad_y, *grads = (next(found) if need else None for need in needs)
        return (
            *(None, None, None, grad_y),
            grad_keep if needs_keep else None,
            grad_gain if needs_gain else None,
            *grads,
        )


def recomputed(
    y: Tensor,
    currents: Currents,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    backend: str,
) -> Tensor:
    """Return the spikes of the currents of y; the currents are recomputed in the backward pass.

    They are as in the forward pass: modes that are set on modules in between change nothing. keep,
    gain, how and backend are those of ``ops/neuron/multi_step.py``.
    """
    out: Tensor = _Recompute.apply(currents, how, backend, y, keep, gain, *currents.learned)
    return out
