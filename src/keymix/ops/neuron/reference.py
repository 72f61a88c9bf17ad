# SPDX-License-Identifier: Apache-2.0
"""Integrate-and-fire in plain PyTorch, as QKFormer's Eq. 1 to 3 have it: the specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keymix.ops.neuron.surrogate import Surrogate


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """What a neuron does besides integrating.

    It fires from ``v_threshold`` on, then goes to ``v_reset``; None takes the threshold off.
    With ``detach_reset`` the gradient passes the reset by. The surrogate is the slope of the step.
    """

    v_threshold: float
    v_reset: float | None
    detach_reset: bool
    surrogate: Surrogate

    @property
    def rest(self) -> float:
        """The potential that the leak pulls to."""
        return 0.0 if self.v_reset is None else self.v_reset


def potential_dtype(x: Tensor) -> torch.dtype:
    """The dtype of potentials: float32, or x's if that has more bits."""
    return torch.promote_types(x.dtype, torch.float32)


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
    how: Dynamics,
) -> tuple[Float[Tensor, "T ..."], Tensor]:
    r"""Run neurons over T steps; return spikes, 0 or 1 in x's dtype, and the last potential.

    .. math::
        H[t] = r + keep (V[t-1] - r) + gain X[t], \quad S[t] = \Theta(H[t] - V_{th}),

    then ``V = H (1 - S) + V_reset S`` (hard reset) or ``V = H - V_th S`` (soft, ``v_reset=None``);
    r is ``v_reset``, or 0, and V starts there if ``v`` is None. LIF has keep = 1 - 1/tau and
    gain = 1/tau, which is Eq. 1; IF has 1 and 1. Tensors keep and gain get gradients.

    Currents are finite: zero times infinity is no number. Potentials are in float32 where x has
    fewer bits, in x's dtype otherwise.
    """
    rest, v_reset, v_threshold = how.rest, how.v_reset, how.v_threshold
    dtype = potential_dtype(x)
    v = torch.full_like(x[0], rest, dtype=dtype) if v is None else v.to(dtype)
    step = _Step if torch.compiler.is_compiling() else _StepAhead
    spikes = []
    for current in x.to(dtype):
        h = rest + keep * (v - rest) + gain * current
        spike = step.apply(h - v_threshold, how.surrogate)
        reset = spike.detach() if how.detach_reset else spike
        v = h - v_threshold * reset if v_reset is None else h * (1 - reset) + v_reset * reset
        spikes.append(spike)
    return torch.stack(spikes).to(x.dtype), v
