# SPDX-License-Identifier: Apache-2.0
"""A neuron behind a function of one large tensor: this tensor alone is kept for the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keymix.errors import UserError
from keymix.ops.neuron.layout import Dynamics, batched
from keymix.ops.neuron.multi_step import gradients, integrate_and_fire


def refuse_unkept(grad: Tensor) -> None:
    """Refuse a backward pass that is to be differentiated, or of many gradients at once.

    Args:
        grad: What the backward pass is given.
    """
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
class Firing:
    """Neurons as they were when a step was taken.

    Attributes:
        how: Threshold, reset and surrogate.
        backend: The path, as ``ops/neuron/multi_step.py`` has it.
    """

    how: Dynamics
    backend: str


@dataclass(frozen=True)
class Currents:
    """What stands between the tensor that is kept and the neurons.

    Attributes:
        first: What is computed; may count, as the running statistics of norms do.
        again: The same of the tensor, of ``learned`` and of ``held``, which must not count.
        learned: What gets a gradient besides the tensor.
        held: What gets none, but may change until the backward pass.
    """

    first: Callable[[Tensor], Tensor]
    again: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
    learned: tuple[Tensor, ...]
    held: tuple[Tensor, ...]


class _Anew(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        currents: Currents,
        firing: Firing,
        y: Tensor,
        keep: float | Tensor,
        gain: float | Tensor,
        *learned: Tensor,
    ) -> Tensor:
        ctx.again, ctx.firing, ctx.count = currents.again, firing, len(learned)
        tensors = [each if isinstance(each, Tensor) else None for each in (keep, gain)]
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in (keep, gain)]
        ctx.save_for_backward(y, *tensors, *learned, *currents.held)
        spikes, _ = integrate_and_fire(
            currents.first(y),
            keep=keep,
            gain=gain,
            how=firing.how,
            backend=firing.backend,
            last=False,
        )
        return spikes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_unkept(grad)
        y, keep, gain, *others = ctx.saved_tensors
        keep, gain = (
            number if tensor is None else tensor
            for number, tensor in zip(ctx.numbers, (keep, gain), strict=True)
        )
        learned, held = others[: ctx.count], others[ctx.count :]
        _, _, needs_y, needs_keep, needs_gain, *needs_learned = ctx.needs_input_grad
        needs = (needs_y, *needs_learned)
        with torch.enable_grad():
            leaves = [
                each.detach().requires_grad_(need)
                for each, need in zip((y, *learned), needs, strict=True)
            ]
            run = ctx.again(leaves[0], leaves[1:], held)
        grad_run, grad_keep, grad_gain = gradients(
            run.detach(),
            grad,
            keep=keep,
            gain=gain,
            how=ctx.firing.how,
            backend=ctx.firing.backend,
        )
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        found = iter(torch.autograd.grad(run, wanted, grad_run) if wanted else ())
        grad_y, *grads = (next(found) if need else None for need in needs)
        return (
            *(None, None, grad_y),
            grad_keep if needs_keep else None,
            grad_gain if needs_gain else None,
            *grads,
        )


def anew(
    y: Tensor,
    currents: Currents,
    keep: float | Tensor,
    gain: float | Tensor,
    firing: Firing,
) -> Tensor:
    """Return the spikes of the currents of y; the currents are run again in the backward pass.

    Everything is as it was in the forward pass: what modules are told in between changes nothing.

    Args:
        y: The one large tensor that is kept.
        currents: From y to what the neurons get.
        keep: As ``ops/neuron/reference.py`` has it; a tensor gets a gradient.
        gain: As there.
        firing: What else the neurons are.
    """
    out: Tensor = _Anew.apply(currents, firing, y, keep, gain, *currents.learned)
    return out
