# SPDX-License-Identifier: Apache-2.0
"""Integrate-and-fire in plain PyTorch, as QKFormer's Eq. 1 to 3 have it: the specification."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keymix.ops.neuron.surrogate import Surrogate


class _Step(torch.autograd.Function):
    """The Heaviside step, 1 from 0 on, with a surrogate's slope behind it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, surrogate: Surrogate) -> Tensor:
        return (x >= 0).to(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Surrogate], output: Tensor) -> None:
        x, ctx.surrogate = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.surrogate.slope(x), None


class _StepAhead(_Step):
    """The same in forward mode too, which no compiler sees through."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (x,) = ctx.saved_tensors
        ahead: Tensor = tangent * ctx.surrogate.slope(x)
        return ahead


def integrate_and_fire(
    x: Float[Tensor, "T ..."],
    v: Tensor | None = None,
    *,
    keep: float | Tensor,
    gain: float | Tensor,
    v_threshold: float,
    v_reset: float | None,
    detach_reset: bool,
    surrogate: Surrogate,
) -> tuple[Float[Tensor, "T ..."], Tensor]:
    r"""Run neurons over T steps.

    .. math::
        H[t] = r + keep (V[t-1] - r) + gain X[t], \quad S[t] = \Theta(H[t] - V_{th}),

    then ``V = H (1 - S) + V_reset S`` (hard reset) or ``V = H - V_th S`` (soft, ``v_reset=None``);
    r is ``v_reset``, or 0. LIF has keep = 1 - 1/tau and gain = 1/tau, which is Eq. 1; IF has 1
    and 1.

    Potentials are held in float32 where x has fewer bits, in x's dtype otherwise.

    Args:
        x: Input currents, finite: zero times infinity is no number.
        v: Potential before the first step; r if None.
        keep: Share of the potential above r that a step keeps; a tensor gets a gradient.
        gain: Weight of the input; a tensor gets a gradient.
        v_threshold: V_th.
        v_reset: Potential after a spike; None takes V_th off instead.
        detach_reset: Whether the gradient passes the reset by.
        surrogate: The slope of the step in the backward pass.

    Returns:
        Spikes, 0 or 1 in x's dtype, and the potential after the last step.
    """
    rest = 0.0 if v_reset is None else v_reset
    held = torch.promote_types(x.dtype, torch.float32)
    v = torch.full_like(x[0], rest, dtype=held) if v is None else v.to(held)
    step = _Step if torch.compiler.is_compiling() else _StepAhead
    spikes = []
    for current in x.to(held):
        h = rest + keep * (v - rest) + gain * current
        spike = step.apply(h - v_threshold, surrogate)
        reset = spike.detach() if detach_reset else spike
        v = h - v_threshold * reset if v_reset is None else h * (1 - reset) + v_reset * reset
        spikes.append(spike)
    return torch.stack(spikes).to(x.dtype), v
