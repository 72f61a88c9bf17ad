# SPDX-License-Identifier: Apache-2.0
"""Spiking neurons as modules: LIF, IF, parametric LIF, and how a model's parts ask for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError, unknown
from keymix.ops.neuron.reference import integrate_and_fire
from keymix.ops.neuron.surrogate import Surrogate

NeuronKind = Literal["lif", "if", "plif", "relu"]
NeuronMaker = Callable[..., nn.Module]
"""Called with ``v_threshold=``, ``device=``, ``dtype=``; makes what maps ``[T, ...]`` to spikes."""


class SpikingNeuron(nn.Module):
    """What all neurons share: currents ``[T, *]`` in, spikes ``[T, *]`` out, from rest each call.

    Args:
        v_threshold: Potential from which on a neuron fires.
        v_reset: Potential after a spike (hard reset); None takes the threshold off (soft reset).
        detach_reset: Whether the gradient passes the reset by.
        surrogate: The slope of the step in the backward pass.
    """

    def __init__(
        self,
        *,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        detach_reset: bool = True,
        surrogate: Surrogate | str = "sigmoid",
    ) -> None:
        super().__init__()
        if not math.isfinite(v_threshold) or (v_reset is not None and not v_reset < v_threshold):
            raise UserError(f"{v_threshold=} must be a number above {v_reset=}")
        self.v_threshold, self.v_reset, self.detach_reset = v_threshold, v_reset, detach_reset
        self.surrogate = Surrogate(surrogate) if isinstance(surrogate, str) else surrogate

    def coefficients(self) -> tuple[float | Tensor, float | Tensor]:
        """Return ``keep`` and ``gain``, as the equation of ``ops/neuron/reference.py`` has them."""
        raise TypeError(f"{type(self).__name__} must define coefficients()")

    def forward(self, x: Float[Tensor, "T ..."]) -> Float[Tensor, "T ..."]:
        """Run T steps from rest."""
        keep, gain = self.coefficients()
        spikes, _ = integrate_and_fire(
            x,
            keep=keep,
            gain=gain,
            v_threshold=self.v_threshold,
            v_reset=self.v_reset,
            detach_reset=self.detach_reset,
            surrogate=self.surrogate,
        )
        return spikes


class LIF(SpikingNeuron):
    """Leaky integrate-and-fire: H = V + (X - (V - V_reset)) / tau.

    Args:
        tau: Membrane time constant, steps, above 1.
        more: As :class:`SpikingNeuron` takes them.
    """

    def __init__(self, *, tau: float = 2.0, **more: Any) -> None:
        super().__init__(**more)
        if not 1 < tau < math.inf:
            raise UserError(f"{tau=} must be a number of steps above 1")
        self.tau = tau

    def coefficients(self) -> tuple[float, float]:
        """1 - 1/tau and 1/tau."""
        return 1 - 1 / self.tau, 1 / self.tau


class IF(SpikingNeuron):
    """Integrate-and-fire without leak: H = V + X."""

    def coefficients(self) -> tuple[float, float]:
        """1 and 1."""
        return 1.0, 1.0


class ParametricLIF(SpikingNeuron):
    """LIF whose 1/tau = sigmoid(w) is learned, one number a layer.

    Args:
        init_tau: Time constant at the start, steps, above 1.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
        more: As :class:`SpikingNeuron` takes them.
    """

    def __init__(
        self, *, init_tau: float = 2.0, device: Any = None, dtype: Any = None, **more: Any
    ) -> None:
        super().__init__(**more)
        if not 1 < init_tau < math.inf:
            raise UserError(f"{init_tau=} must be a number of steps above 1")
        self.init_tau = init_tau
        self.w = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at ``init_tau``."""
        nn.init.constant_(self.w, -math.log(self.init_tau - 1))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """1 - sigmoid(w) and sigmoid(w)."""
        gain = self.w.sigmoid()
        return 1 - gain, gain


@dataclass(frozen=True, kw_only=True)
class Neurons:
    """Makes the neurons of a model, all of one kind.

    Args:
        kind: ``"lif"``, ``"if"``, ``"plif"``; or ``"relu"``, which makes the model's non-spiking
            twin.
        tau: Time constant of LIF, and of PLIF at its start, steps.
        v_reset: Potential after a spike; None for a soft reset.
        detach_reset: Whether the gradient passes the reset by.
        surrogate: The slope of the step in the backward pass.
    """

    kind: NeuronKind = "lif"
    tau: float = 2.0
    v_reset: float | None = 0.0
    detach_reset: bool = True
    surrogate: Surrogate | str = "sigmoid"

    def __post_init__(self) -> None:
        if self.kind not in ("lif", "if", "plif", "relu"):
            raise unknown("neuron", str(self.kind), ("lif", "if", "plif", "relu"))

    def __call__(
        self, *, v_threshold: float = 1.0, device: Any = None, dtype: Any = None
    ) -> nn.Module:
        """Make one neuron layer."""
        if self.kind == "relu":
            return nn.ReLU()
        shared: dict[str, Any] = {
            "v_threshold": v_threshold,
            "v_reset": self.v_reset,
            "detach_reset": self.detach_reset,
            "surrogate": self.surrogate,
        }
        if self.kind == "if":
            return IF(**shared)
        if self.kind == "lif":
            return LIF(tau=self.tau, **shared)
        return ParametricLIF(init_tau=self.tau, device=device, dtype=dtype, **shared)


def neuron_maker(neuron: str | NeuronMaker) -> NeuronMaker:
    """Return what makes a model's neurons, from a kind's name or a maker.

    Args:
        neuron: ``"lif"``, ``"if"``, ``"plif"``, ``"relu"``, :class:`Neurons`, or a function.
    """
    return Neurons(kind=neuron) if isinstance(neuron, str) else neuron  # type: ignore[arg-type]
