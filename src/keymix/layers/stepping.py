# SPDX-License-Identifier: Apache-2.0
"""What takes many steps from rest in one call, or one step a call, as frames come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from torch import nn

from keymix.errors import UserError

StepMode = Literal["m", "s"]
Model = TypeVar("Model", bound=nn.Module)


class Stepping(nn.Module):
    """What runs many steps from rest (mode ``"m"``), or one after another with state (``"s"``).

    The words are SpikingJelly's, whose ``functional.set_step_mode`` and ``functional.reset_net``
    serve here too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step_mode: StepMode = "m"

    @property
    def step_mode(self) -> str:
        """``"m"``: many steps ``[T, *]`` from rest; ``"s"``: one step ``[*]`` from the last."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, mode: str) -> None:
        if mode not in ("m", "s"):
            raise UserError(f"step_mode={mode!r} must be 'm' for many steps or 's' for one")
        self.take_mode(mode)
        if mode != self._step_mode:
            self.reset()
        self._step_mode = mode  # type: ignore[assignment]

    def take_mode(self, mode: str) -> None:
        """Set a mode, ``"m"`` or ``"s"``, on the parts before it is set here, or refuse it."""

    def reset(self) -> None:
        """Go to rest."""
        raise TypeError(f"{type(self).__name__} must define reset()")

    def train(self, mode: bool = True) -> Any:
        """As PyTorch's; whoever turns from training to evaluation or back starts from rest."""
        if mode != self.training:
            self.reset()
        return super().train(mode)


@contextmanager
def stepping(model: Model) -> Iterator[Model]:
    """Let all neurons of a model take one step a call, from rest and with state, within the block.

    Afterwards, and after an exception, they take ``[T, *]`` from rest as before and the state is
    gone. With norms in evaluation mode, T calls compute what one call on T steps computes.

    Args:
        model: Any module; its neurons are ours, or were made by
            :func:`keymix.layers.neurons.neuron_maker`.

    Yields:
        The model.
    """
    neurons = [part for part in model.modules() if isinstance(part, Stepping)]
    before = [neuron.step_mode for neuron in neurons]
    try:
        for neuron in neurons:
            neuron.step_mode = "s"
            neuron.reset()
        yield model
    finally:
        for neuron, mode in zip(neurons, before, strict=True):
            if neuron.step_mode != mode:
                neuron.step_mode = mode
            neuron.reset()
