# SPDX-License-Identifier: Apache-2.0
"""A function of one large tensor that keeps this tensor alone and is run anew on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from keymix.errors import UserError


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
        again: Callable[[Tensor], Tensor],
        y: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.again = again
        ctx.save_for_backward(y, *weights)
        return first(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        y, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaf = y.detach().requires_grad_(needs[0])
            wanted = [each for each, need in zip((leaf, *weights), needs, strict=True) if need]
            found = iter(torch.autograd.grad(ctx.again(leaf), wanted, grad))
        return (None, None, *(next(found) if need else None for need in needs))


def anew(
    first: Callable[[Tensor], Tensor],
    again: Callable[[Tensor], Tensor],
    y: Tensor,
    weights: tuple[Tensor, ...],
) -> Tensor:
    """Return ``first(y)``; its gradients are those of ``again(y)``, run in the backward pass.

    Args:
        first: What is computed; may count, as the running statistics of norms do.
        again: The same function of y and ``weights``, which must not count.
        y: The one tensor that is kept.
        weights: What else gets a gradient, as ``again`` uses it.
    """
    out: Tensor = _Anew.apply(first, again, y, *weights)
    return out
