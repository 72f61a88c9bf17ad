# SPDX-License-Identifier: Apache-2.0
"""Steps as rows: how tensors ``[T, ...]`` of any memory format are walked through in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from keymix.ops.neuron.surrogate import Surrogate


def forward_mode() -> bool:
    """Whether derivatives are carried along in the forward pass."""
    return forward_ad._current_level >= 0


def batched(*grads: Tensor | None) -> bool:
    """Whether one of the gradients is many, as ``is_grads_batched`` and ``vmap`` hand them over.

    Args:
        grads: What a backward pass is given.
    """
    look = torch._C._functorch
    return any(
        each is not None and (look.is_batchedtensor(each) or look.is_legacy_batchedtensor(each))
        for each in grads
    )


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """What a neuron does besides integrating, as ``ops/neuron/reference.py`` has it.

    Attributes:
        v_threshold: Potential from which on it fires.
        v_reset: Potential after a spike; None takes the threshold off.
        detach_reset: Whether the gradient passes the reset by.
        surrogate: The slope of the step in the backward pass.
    """

    v_threshold: float
    v_reset: float | None
    detach_reset: bool
    surrogate: Surrogate

    @property
    def rest(self) -> float:
        """The potential that the leak pulls to."""
        return 0.0 if self.v_reset is None else self.v_reset


@dataclass(frozen=True)
class Rows:
    """An order of the neurons in which the currents of a step lie side by side in memory.

    Attributes:
        shape: That of one step.
        order: Its axes, the slowest first.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """Read the order off ``x[T, ...]``: channels last stays so, steps come outermost."""
        strides = x.stride()[1:]
        order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
        return cls(tuple(x.shape[1:]), tuple(order))

    @property
    def count(self) -> int:
        """Neurons."""
        return torch.Size(self.shape).numel()

    def flat(self, step: Tensor) -> Tensor:
        """Lay one step ``[...]`` out as ``[n]``, without a copy where memory permits."""
        return step.permute(self.order).reshape(self.count)

    def steps(self, x: Tensor) -> Tensor:
        """Lay ``x[T, ...]`` out as ``[T, n]``, without a copy where memory permits."""
        return x.permute(0, *(axis + 1 for axis in self.order)).reshape(x.shape[0], self.count)

    def back(self, flat: Tensor) -> Tensor:
        """Give ``[n]`` or ``[T, n]`` its axes again, in x's memory format."""
        lead = flat.shape[:-1]
        sizes = [self.shape[axis] for axis in self.order]
        inverse = _inverse(self.order)
        turn = (*range(len(lead)), *(axis + len(lead) for axis in inverse))
        return flat.view((*lead, *sizes)).permute(turn)

    def own(self, flat: Tensor) -> Tensor:
        """Give axes as :meth:`back` does, to a tensor that is no view, so that it can be changed.

        What a function returns as a view cannot be changed in place where a gradient passes.
        """
        turned = self.back(flat)
        storage = flat.untyped_storage()
        return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
            storage, turned.storage_offset(), turned.shape, turned.stride()
        )

    def coefficient(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Bring a learned coefficient to no axis or to ``[n]``."""
        value = value.detach().to(dtype)
        if value.numel() == 1:
            return value.reshape(())
        return self.flat(value.expand(self.shape))

    def coefficient_back(self, grad: Tensor, like: Tensor) -> Tensor:
        """Bring the gradient of a coefficient to the coefficient's shape and dtype."""
        if grad.ndim:
            grad = self.back(grad).sum_to_size(like.shape)
        return grad.reshape(like.shape).to(like.dtype)


def _inverse(order: Sequence[int]) -> list[int]:
    inverse = [0] * len(order)
    for at, axis in enumerate(order):
        inverse[axis] = at
    return inverse


def held_dtype(x: Tensor) -> torch.dtype:
    """The dtype of potentials: float32, or x's if that has more bits."""
    return torch.promote_types(x.dtype, torch.float32)
