# SPDX-License-Identifier: Apache-2.0
"""Smooth steps whose slope stands for that of the Heaviside step in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keymix.errors import UserError, unknown


@dataclass(frozen=True)
class Shape:
    """A family of smooth steps.

    Attributes:
        alpha: Steepness where none is named.
        primitive: The smooth step of (x, alpha), rising from 0 to 1.
        slope: Its derivative by x.
    """

    alpha: float
    primitive: Callable[[Tensor, float], Tensor]
    slope: Callable[[Tensor, float], Tensor]


def _sigmoid_slope(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(alpha * x)
    return alpha * s * (1 - s)


def _atan(x: Tensor, alpha: float) -> Tensor:
    return torch.atan(0.5 * math.pi * alpha * x) / math.pi + 0.5


def _atan_slope(x: Tensor, alpha: float) -> Tensor:
    return 0.5 * alpha / (1 + (0.5 * math.pi * alpha * x).square())


SHAPES: dict[str, Shape] = {
    "sigmoid": Shape(4.0, lambda x, alpha: torch.sigmoid(alpha * x), _sigmoid_slope),
    "atan": Shape(2.0, _atan, _atan_slope),
}


@dataclass(frozen=True)
class Surrogate:
    r"""Which smooth step a neuron's backward pass takes.

    ``sigmoid``: :math:`\sigma(x) = 1 / (1 + e^{-\alpha x})`, QKFormer's with alpha 4
    (https://arxiv.org/abs/2403.16552, Eq. 18). ``atan``:
    :math:`\arctan(\pi \alpha x / 2) / \pi + 1/2`, SEW ResNet's with alpha 2
    (https://arxiv.org/abs/2102.04159).

    Args:
        name: ``"sigmoid"`` or ``"atan"``.
        alpha: Steepness, above 0; None for the family's own.

    Raises:
        UserError: If the name is unknown or alpha is not above 0.
    """

    name: str = "sigmoid"
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.name not in SHAPES:
            raise unknown("surrogate", str(self.name), SHAPES)
        if self.alpha is None:
            object.__setattr__(self, "alpha", SHAPES[self.name].alpha)
        elif not 0 < self.alpha < math.inf:
            raise UserError(f"alpha={self.alpha!r} of a surrogate must be a number above 0")

    @property
    def steepness(self) -> float:
        """Alpha, the family's own where none was named."""
        assert self.alpha is not None  # set in __post_init__
        return float(self.alpha)

    def primitive(self, x: Tensor) -> Tensor:
        """The smooth step itself, whose finite differences the surrogate gradient meets."""
        return SHAPES[self.name].primitive(x, self.steepness)

    def slope(self, x: Tensor) -> Tensor:
        """The derivative of the smooth step."""
        return SHAPES[self.name].slope(x, self.steepness)
