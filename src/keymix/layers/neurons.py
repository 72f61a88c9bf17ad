# SPDX-License-Identifier: Apache-2.0
"""Spiking neurons as modules: ours, those of other libraries, and how a model asks for one."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import KeymixWarning, UserError, unknown
from keymix.layers.stepping import Stepping
from keymix.ops.neuron.multi_step import (
    Backend,
    Choice,
    check_backend,
    choose,
    integrate_and_fire,
)
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.neuron.surrogate import Surrogate

NeuronKind = Literal["lif", "if", "plif", "relu"]
NeuronMaker = Callable[..., nn.Module]
"""Called with ``v_threshold=``, ``device=``, ``dtype=``; makes what maps ``[T, ...]`` to spikes."""


class SpikingNeuron(Stepping):
    """What all neurons share: currents ``[T, *]`` in, spikes ``[T, *]`` out, from rest each call.

    In step mode ``"s"`` a call is one step, ``[*]`` to ``[*]``, and the potential ``v`` stays until
    :meth:`reset`; it is in no state dict and goes into no copy. Where currents of another shape,
    dtype or device come, the neuron says so and starts from rest.

    Args:
        v_threshold: Potential from which on a neuron fires.
        v_reset: Potential after a spike (hard reset), below the threshold; None takes the
            threshold off (soft reset).
        detach_reset: Whether the gradient passes the reset by.
        surrogate: The slope of the step in the backward pass.
        backend: ``"auto"``, or a path by name (``"reference"``, ``"blocked"``, ``"triton"``), which
            runs or raises with the reason.

    Raises:
        UserError: If the resting potential is not below the threshold, or a name is unknown.
    """

    def __init__(
        self,
        *,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        detach_reset: bool = True,
        surrogate: Surrogate | str = "sigmoid",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if v_reset is None:
            if not 0 < v_threshold < math.inf:
                raise UserError(f"{v_threshold=} must be above 0, where a soft reset rests")
        elif not -math.inf < v_reset < v_threshold < math.inf:
            raise UserError(f"{v_threshold=} must be a number above {v_reset=}")
        check_backend(backend)
        if isinstance(surrogate, str):
            surrogate = Surrogate(surrogate)
        self.v_threshold, self.v_reset, self.detach_reset = v_threshold, v_reset, detach_reset
        self.surrogate, self.backend = surrogate, backend
        self.v: Tensor | None = None
        self._input: tuple[Any, ...] | None = None  # shape, dtype, device of what v belongs to

    def coefficients(self) -> tuple[float | Tensor, float | Tensor]:
        """Return ``keep`` and ``gain``, as the equation of ``ops/neuron/reference.py`` has them."""
        raise TypeError(f"{type(self).__name__} must define coefficients()")

    @property
    def dynamics(self) -> Dynamics:
        """Threshold, reset and surrogate."""
        return Dynamics(
            v_threshold=self.v_threshold,
            v_reset=self.v_reset,
            detach_reset=self.detach_reset,
            surrogate=self.surrogate,
        )

    def reset(self) -> None:
        """Forget the potential."""
        self.v = self._input = None

    def detach(self) -> None:
        """Cut the potential off from the steps before, for truncated backpropagation."""
        self.v = None if self.v is None else self.v.detach()

    def choose_backend(self, x: Tensor | None = None, device: torch.device | None = None) -> Choice:
        """Say which path runs and why.

        Args:
            x: The currents; None if they are not known yet.
            device: Where it will run if ``x`` is None; the CPU by default.

        Raises:
            UserError: If a backend was named at construction and cannot run; with the reason.
        """
        return choose(self.backend, x, device)

    def forward(self, x: Float[Tensor, "*step"]) -> Float[Tensor, "*step"]:
        """Run ``[T, *]`` from rest; in step mode ``"s"``, one step ``[*]`` from where it stands."""
        keep, gain = self.coefficients()
        if self._step_mode == "m":
            return integrate_and_fire(
                x, keep=keep, gain=gain, how=self.dynamics, backend=self.backend, last=False
            )[0]
        given = (tuple(x.shape), x.dtype, x.device)
        if self.v is not None and given != self._input:
            warnings.warn(
                f"{type(self).__name__} was given currents {_words(given)} after "
                f"{_words(self._input)} and starts from rest; call reset() between sequences",
                KeymixWarning,
                stacklevel=2,
            )
            self.reset()
        spikes, self.v = integrate_and_fire(
            x[None], self.v, keep=keep, gain=gain, how=self.dynamics, backend=self.backend
        )
        self._input = given
        return spikes[0]

    def extra_repr(self) -> str:
        """Show the options."""
        parts = [
            f"v_threshold={self.v_threshold}",
            f"v_reset={self.v_reset}",
            f"detach_reset={self.detach_reset}",
            f"surrogate={self.surrogate.name}({self.surrogate.steepness})",
        ]
        if self.backend != "auto":
            parts.append(f"backend={self.backend!r}")
        if self._step_mode != "m":
            parts.append(f"step_mode={self._step_mode!r}")
        return ", ".join(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "v": None, "_input": None}


def _words(given: tuple[Any, ...] | None) -> str:
    shape, dtype, device = given or ((), None, None)
    return f"{list(shape)} ({dtype}, {device})"


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

    def extra_repr(self) -> str:
        """Show the options."""
        return f"tau={self.tau}, {super().extra_repr()}"

    def coefficients(self) -> tuple[float, float]:
        """1 - 1/tau and 1/tau."""
        return 1 - 1 / self.tau, 1 / self.tau


class IF(SpikingNeuron):
    """Integrate-and-fire without leak: H = V + X."""

    def coefficients(self) -> tuple[float, float]:
        """1 and 1."""
        return 1.0, 1.0


class ParametricLIF(SpikingNeuron):
    """LIF whose 1/tau = sigmoid(w) is learned, one number per layer.

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

    def extra_repr(self) -> str:
        """Show the options."""
        return f"init_tau={self.init_tau}, {super().extra_repr()}"

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """1 - sigmoid(w) and sigmoid(w)."""
        gain = self.w.sigmoid()
        return 1 - gain, gain


@dataclass(frozen=True, kw_only=True)
class Neurons:
    """Makes the neurons of a model, all of one kind.

    Args:
        kind: ``"lif"``, ``"if"``, ``"plif"``; or ``"relu"``, which makes the model's ANN
            counterpart.
        tau: Time constant of LIF, and of PLIF at its start, steps.
        v_reset: Potential after a spike; None for a soft reset.
        detach_reset: Whether the gradient passes the reset by.
        surrogate: The slope of the step in the backward pass.
        backend: As :class:`SpikingNeuron` takes it.

    Raises:
        UserError: If a name is unknown or a number out of range.
    """

    kind: NeuronKind = "lif"
    tau: float = 2.0
    v_reset: float | None = 0.0
    detach_reset: bool = True
    surrogate: Surrogate | str = "sigmoid"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.kind not in ("lif", "if", "plif", "relu"):
            raise unknown("neuron", str(self.kind), ("lif", "if", "plif", "relu"))
        if self.kind != "relu":  # bad numbers are refused here, not where the first layer is built
            self(
                v_threshold=1.0 if self.v_reset is None else max(1.0, self.v_reset + 1),
                device="meta",
            )

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
            "backend": self.backend,
        }
        if self.kind == "if":
            return IF(**shared)
        if self.kind == "lif":
            return LIF(tau=self.tau, **shared)
        return ParametricLIF(init_tau=self.tau, device=device, dtype=dtype, **shared)


class StatelessNeuron(Stepping):
    """Holds a module that keeps state so that none survives a call.

    The module, such as SpikingJelly's neurons, is set to run many steps and is reset before and
    after every call. In step mode ``"s"`` it runs one step a call and keeps its state until
    :meth:`reset`, as our own neurons do.

    Args:
        neuron: Maps currents ``[T, *]`` to spikes; it, or what it is made of, has ``reset()``.
    """

    def __init__(self, neuron: nn.Module) -> None:
        super().__init__()
        self.neuron = neuron
        self.take_mode(self._step_mode)

    def take_mode(self, mode: str) -> None:
        """Set the mode of the module, or say that it has none."""
        parts = list(_with_step_mode(self.neuron))
        if not parts and mode == "s":
            raise UserError(
                f"{type(self.neuron).__name__} has no step_mode: it cannot run one step"
            )
        for part in parts:
            if part.step_mode != mode:
                part.step_mode = mode

    def reset(self) -> None:
        """Reset whatever in it has ``reset()``."""
        for part in self.neuron.modules():
            reset = getattr(part, "reset", None)
            if callable(reset):
                reset()

    def forward(self, x: Float[Tensor, "*step"]) -> Float[Tensor, "*step"]:
        """Run the module on ``[T, *]`` from rest, or in step mode ``"s"`` on one step ``[*]``."""
        self.take_mode(self._step_mode)  # it may have been set past us
        if self._step_mode == "s":
            spikes: Tensor = self.neuron(x)
            return spikes
        self.reset()
        try:
            spikes = self.neuron(x)
        finally:
            self.reset()
        return spikes


def _with_step_mode(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that have a step mode; what is inside them is their affair."""
    if hasattr(module, "step_mode"):
        yield module
    else:
        for child in module.children():
            yield from _with_step_mode(child)


@dataclass(frozen=True)
class _Made:
    """Calls a user's maker, and wraps what keeps state.

    The maker takes ``v_threshold`` by name, and ``device`` and ``dtype`` if it likes.
    """

    maker: Callable[..., nn.Module]

    def __call__(
        self, *, v_threshold: float = 1.0, device: Any = None, dtype: Any = None
    ) -> nn.Module:
        """Make one layer of neurons."""
        given = {"v_threshold": v_threshold, "device": device, "dtype": dtype}
        taken = inspect.signature(self.maker).parameters
        ours = inspect.isclass(self.maker) and issubclass(self.maker, Stepping)
        if ours and "device" not in taken:  # hands further options on to what has no weights
            given = {"v_threshold": v_threshold}
        elif not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            given = {name: value for name, value in given.items() if name in taken}
        name = getattr(self.maker, "__name__", repr(self.maker))
        if "v_threshold" not in given:
            raise UserError(f"{name} makes neurons but takes no v_threshold, which models set")
        made = self.maker(**given)
        if not isinstance(made, nn.Module):
            raise UserError(f"{name} made a {type(made).__name__}, not a module of neurons")
        made = made.to(device=device, dtype=dtype)
        if isinstance(made, Stepping):
            return made
        keeps = any(callable(getattr(part, "reset", None)) for part in made.modules())
        return StatelessNeuron(made) if keeps else made


def neuron_maker(neuron: str | NeuronMaker) -> NeuronMaker:
    """Return what makes a model's neurons, from a kind's name or a maker.

    What a function makes and what keeps state is wrapped, so that no model can forget to reset it
    (:class:`StatelessNeuron`).

    Args:
        neuron: ``"lif"``, ``"if"``, ``"plif"``, ``"relu"``, :class:`Neurons`, or a function or
            class that takes ``v_threshold`` by name, such as SpikingJelly's ``LIFNode``.

    Raises:
        UserError: If it is an unknown name, or a neuron and not what makes one.
    """
    if isinstance(neuron, str):
        return Neurons(kind=neuron)  # type: ignore[arg-type]
    if isinstance(neuron, nn.Module) or not callable(neuron):
        raise UserError(
            f"neuron={type(neuron).__name__} is not what makes neurons: give a kind's name, "
            "Neurons(...), or a function of v_threshold that returns a module"
        )
    return neuron if isinstance(neuron, (Neurons, _Made)) else _Made(neuron)
