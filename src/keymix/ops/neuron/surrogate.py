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
    """A family of smooth steps: the slope at x is ``peak alpha bell(stretch alpha x)``.

    ``primitive``, the smooth step of ``stretch alpha x``, rises from 0 to 1; ``bell`` is its
    derivative but for factors, an even function. ``bell_`` puts the bell of u, stretched, times a
    gradient into u's place. ``alpha`` is the steepness where none is given.
    """

    alpha: float
    stretch: float
    peak: float
    primitive: Callable[[Tensor], Tensor]
    bell: Callable[[Tensor], Tensor]
    bell_: Callable[[Tensor, float, Tensor], None]


def _sigmoid_bell(u: Tensor) -> Tensor:
    s = torch.sigmoid(u)
    return s * (1 - s)


def _sigmoid_bell_(u: Tensor, stretch: float, grad: Tensor) -> None:
    if stretch != 1:
        u.mul_(stretch)
    u.sigmoid_()
    torch.ops.aten.sigmoid_backward.grad_input(grad, u, grad_input=u)


def _atan_bell_(u: Tensor, stretch: float, grad: Tensor) -> None:
    torch.addcmul(u.new_ones(()), u, u, value=stretch * stretch, out=u)
    torch.div(grad, u, out=u)


SHAPES: dict[str, Shape] = {
    "sigmoid": Shape(4.0, 1.0, 1.0, torch.sigmoid, _sigmoid_bell, _sigmoid_bell_),
    "atan": Shape(
        2.0,
        math.pi / 2,
        0.5,
        lambda u: torch.atan(u) / math.pi + 0.5,
        lambda u: 1 / (1 + u.square()),
        _atan_bell_,
    ),
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

    @property
    def stretch(self) -> float:
        """What x is multiplied by within the bell."""
        return SHAPES[self.name].stretch * self.steepness

    @property
    def peak(self) -> float:
        """What the bell is multiplied by."""
        return SHAPES[self.name].peak * self.steepness

    def primitive(self, x: Tensor) -> Tensor:
        """The smooth step itself, whose finite differences the surrogate gradient meets."""
        return SHAPES[self.name].primitive(self.stretch * x)

    def slope(self, x: Tensor) -> Tensor:
        """The derivative of the smooth step."""
        return self.peak * SHAPES[self.name].bell(self.stretch * x)
