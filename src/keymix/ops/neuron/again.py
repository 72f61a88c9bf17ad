# SPDX-License-Identifier: Apache-2.0
"""Gradients through the reference: for gradients of gradients, and for many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keymix.ops.neuron.layout import Dynamics
from keymix.ops.neuron.reference import integrate_and_fire


def again(
    x: Tensor,
    v: Tensor | None,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    grads: Tensor | None,
    last: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Any, ...]:
    """Run the reference on the same inputs and differentiate it; the graph stays if grads are on.

    Args:
        x: As the reference takes it, and the next five.
        v: See there.
        keep: See there.
        gain: See there.
        how: See there.
        grads: Gradient of the spikes, None for zero.
        last: Gradient of the last potential, None for zero.
        needs: Which of the inputs want a gradient.

    Returns:
        Gradients of x, v, keep, gain, and None for ``how`` and what comes after.
    """
    with torch.enable_grad():
        # views, so that what one input hangs on another by stays out of their gradients
        inputs: list[Any] = [
            each.view_as(each) if isinstance(each, Tensor) else each for each in (x, v, keep, gain)
        ]
        spikes, potential = integrate_and_fire(
            *inputs[:2],
            keep=inputs[2],
            gain=inputs[3],
            v_threshold=how.v_threshold,
            v_reset=how.v_reset,
            detach_reset=how.detach_reset,
            surrogate=how.surrogate,
        )
    pairs = [(spikes, grads), (potential, last)]
    wanted = [each for each, need in zip(inputs, needs, strict=False) if need]
    found = torch.autograd.grad(
        [out for out, grad in pairs if grad is not None],
        wanted,
        [grad for _, grad in pairs if grad is not None],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    rest = iter(found)
    return (*(next(rest) if need else None for need in needs[:4]), *([None] * (len(needs) - 4)))
