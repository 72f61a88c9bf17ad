# SPDX-License-Identifier: Apache-2.0
"""Neurons of other libraries in our models: nothing that they keep survives a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.step_mode import Stepping


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
class Made:
    """Calls a user's maker and sees to it that what it makes keeps no state.

    Attributes:
        maker: Takes ``v_threshold`` by name, and ``device`` and ``dtype`` if it likes.
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
