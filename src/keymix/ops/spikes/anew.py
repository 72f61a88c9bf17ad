# SPDX-License-Identifier: Apache-2.0
"""A neuron behind a function of one large tensor: this tensor alone is kept for the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keymix.errors import UserError

Gradients = Callable[[Tensor, Tensor], Sequence[Tensor | None]]


def refuse_twice() -> None:
    """Refuse a backward pass that is to be differentiated: what it would need was not kept."""
    if torch.is_grad_enabled():
        raise UserError(
            "create_graph=True: a spiking step keeps too little for gradients of gradients; run "
            "the forward pass within keymix.layers.spiking_block.plain_steps()"
        )


class _Anew(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first: Callable[[Tensor], Tensor],
        currents: Callable[[Tensor], Tensor],
        gradients: Gradients,
        count: int,
        y: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.currents, ctx.gradients, ctx.count = currents, gradients, count
        ctx.save_for_backward(y, *weights)
        return first(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        y, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        inner, needs_inner = weights[: ctx.count], needs[1 : 1 + ctx.count]
        with torch.enable_grad():
            leaf = y.detach().requires_grad_(needs[0])
            run = ctx.currents(leaf)
            grad_run, *outer = ctx.gradients(run.detach(), grad)
            wanted = [
                each
                for each, need in zip((leaf, *inner), (needs[0], *needs_inner), strict=True)
                if need
            ]
            found = iter(torch.autograd.grad(run, wanted, grad_run) if wanted else ())
        first = [next(found) if need else None for need in (needs[0], *needs_inner)]
        return None, None, None, None, *first, *outer


def anew(
    first: Callable[[Tensor], Tensor],
    currents: Callable[[Tensor], Tensor],
    gradients: Gradients,
    y: Tensor,
    inner: Sequence[Tensor],
    outer: Sequence[Tensor],
) -> Tensor:
    """Return ``first(y)``, spikes; the currents behind them are run again in the backward pass.

    Args:
        first: What is computed; may count, as the running statistics of norms do.
        currents: The currents of y and ``inner`` that the neurons of ``first`` get; must not count.
        gradients: From currents and gradients of the spikes, the gradients of the currents and of
            ``outer``.
        y: The one tensor that is kept.
        inner: What else of ``currents`` gets a gradient.
        outer: What of the neurons gets a gradient.
    """
    out: Tensor = _Anew.apply(first, currents, gradients, len(inner), y, *inner, *outer)
    return out
