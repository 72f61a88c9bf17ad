# SPDX-License-Identifier: Apache-2.0
"""What takes many steps from rest in one call, or one step a call."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from keymix.errors import UserError

StepMode = Literal["m", "s"]


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
            raise UserError(f"step_mode={mode!r} must be 'm' for many steps or 's' for one a call")
        self.take_mode(mode)
        if mode != self._step_mode:
            self.reset()
        self._step_mode = mode  # type: ignore[assignment]

    def take_mode(self, mode: str) -> None:
        """Hand a mode that is about to be set on to the parts, or refuse it.

        Args:
            mode: ``"m"`` or ``"s"``.
        """

    def reset(self) -> None:
        """Go to rest."""
        raise TypeError(f"{type(self).__name__} must define reset()")

    def train(self, mode: bool = True) -> Any:
        """As PyTorch's; whoever turns from training to evaluation or back starts from rest."""
        if mode != self.training:
            self.reset()
        return super().train(mode)
