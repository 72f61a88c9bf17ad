# SPDX-License-Identifier: Apache-2.0
"""The autograd function around kernels: tensors of any layout as rows, gradients in their shapes.

A kernel computes the reference's function on rows and brings a backward pass of its own, which
gets the currents alone. Gradients of gradients, and many at once, go through the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from keymix.ops.neuron.reference import Dynamics, integrate_and_fire, potential_dtype
from keymix.ops.tracing import batched

Coefficient = float | Tensor
Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Of x, v, keep and gain."""


@dataclass(frozen=True)
class Neurons:
    """Neurons as a row: ``x[T, n]``, ``v[n]``; keep and gain are numbers, ``[]`` or ``[n]``.

    v, keep and gain have the dtype of potentials, x may have fewer bits; v is None at rest.
    """

    x: Tensor
    v: Tensor | None
    keep: Coefficient
    gain: Coefficient
    how: Dynamics


@runtime_checkable
class Kernel(Protocol):
    """A module that computes what the reference computes, on rows."""

    def forward(self, neurons: Neurons, last: bool) -> tuple[Tensor, Tensor | None]:
        """Spikes ``[T, n]`` in x's dtype and, if wanted, the last potential ``[n]``."""

    def backward(
        self, neurons: Neurons, grads: Tensor, last: Tensor | None, wanted: Sequence[bool]
    ) -> Gradients:
        """Gradients of x and, where ``wanted``, of v ``[n]``, keep and gain (``[]`` or ``[n]``).

        ``grads [T, n]`` are those of the spikes, ``last [n]`` of the last potential or None.
        """


@dataclass(frozen=True)
class Rows:
    """An order of a step's axes, slowest first, in which its currents are adjacent in memory."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """Read the order off ``x[T, ...]``: channels last stays so, steps come outermost."""
        strides = x.stride()[1:]
        order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
        return cls(tuple(x.shape[1:]), tuple(order))

    def flat(self, x: Tensor) -> Tensor:
        """Reshape ``[...]`` to ``[n]``, ``[T, ...]`` to ``[T, n]``, if possible without a copy."""
        lead = x.ndim - len(self.order)
        turned = x.permute((*range(lead), *(axis + lead for axis in self.order)))
        return turned.reshape(*x.shape[:lead], torch.Size(self.shape).numel())

    def back(self, flat: Tensor) -> Tensor:
        """Give ``[n]`` or ``[T, n]`` its axes again, in x's memory format."""
        lead = flat.ndim - 1
        sizes = [self.shape[axis] for axis in self.order]
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        turn = (*range(lead), *(axis + lead for axis in inverse))
        return flat.view((*flat.shape[:-1], *sizes)).permute(turn)

    def own(self, flat: Tensor) -> Tensor:
        """Give axes as :meth:`back` does, to a tensor that is no view, so that it can be changed.

        What a function returns as a view cannot be changed in place where a gradient passes.
        """
        turned = self.back(flat)
        storage = flat.untyped_storage()
        return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
            storage, turned.storage_offset(), turned.shape, turned.stride()
        )

    def neurons(
        self, x: Tensor, v: Tensor | None, keep: Coefficient, gain: Coefficient, how: Dynamics
    ) -> Neurons:
        """Flatten everything that goes into neurons."""
        dtype = potential_dtype(x)
        start = None if v is None else self.flat(v.to(dtype).expand(self.shape))
        keep, gain = (self._coefficient(each, dtype) for each in (keep, gain))
        return Neurons(self.flat(x), start, keep, gain, how)

    def _coefficient(self, value: Coefficient, dtype: torch.dtype) -> Coefficient:
        if not isinstance(value, Tensor):
            return float(value)
        value = value.detach().to(dtype)
        return value.reshape(()) if value.numel() == 1 else self.flat(value.expand(self.shape))

    def gradient(self, grad: Tensor | None, like: Coefficient | None) -> Tensor | None:
        """Bring the gradient of v, keep or gain to the shape and dtype of what it is of."""
        if grad is None or not isinstance(like, Tensor):
            return None
        if grad.ndim:
            grad = self.back(grad).sum_to_size(like.shape)
        return grad.reshape(like.shape).to(like.dtype)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        v: Tensor | None,
        keep: Coefficient,
        gain: Coefficient,
        how: Dynamics,
        kernel: Kernel,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        tensors = [each if isinstance(each, Tensor) else None for each in (keep, gain)]
        ctx.save_for_backward(x, v, *tensors)
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in (keep, gain)]
        ctx.how, ctx.kernel = how, kernel
        ctx.set_materialize_grads(False)
        rows = Rows.of(x)
        spikes, final = kernel.forward(rows.neurons(x, v, keep, gain, how), last)
        return rows.own(spikes), None if final is None else rows.own(final)

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None, last: Tensor | None) -> tuple[Any, ...]:
        x, v, *tensors = ctx.saved_tensors
        pairs = zip(tensors, ctx.numbers, strict=True)
        keep, gain = (number if tensor is None else tensor for tensor, number in pairs)
        needs, how = ctx.needs_input_grad[:4], ctx.how
        if torch.is_grad_enabled() or batched(grads, last):  # every operation is followed
            found = _through_reference((x, v, keep, gain), how, grads, last, needs)
            return *found, None, None, None
        rows = Rows.of(x)
        if grads is None:
            grads = torch.zeros((), dtype=x.dtype, device=x.device).expand_as(x)
        grad_x, *of_others = ctx.kernel.backward(
            rows.neurons(x, v, keep, gain, how),
            rows.flat(grads),
            None if last is None else rows.flat(last),
            needs[1:],
        )
        others = zip(of_others, (v, keep, gain), strict=True)
        found = (rows.back(grad_x), *(rows.gradient(grad, like) for grad, like in others))
        return *found, None, None, None


def run_kernel(
    kernel: Kernel,
    x: Tensor,
    v: Tensor | None,
    keep: Coefficient,
    gain: Coefficient,
    how: Dynamics,
    last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the reference computes, spikes to the bit; the last potential if wanted."""
    spikes, final = _Function.apply(x, v, keep, gain, how, kernel, last)
    return spikes, final


def _through_reference(
    given: tuple[Any, ...],
    how: Dynamics,
    grads: Tensor | None,
    last: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, v, keep and gain that are needed; they can be followed again."""
    with torch.enable_grad():
        # views, so that what one input depends on another by stays out of their gradients
        inputs = [each.view_as(each) if isinstance(each, Tensor) else each for each in given]
        x, v, keep, gain = inputs
        outputs = integrate_and_fire(x, v, keep=keep, gain=gain, how=how)
    pairs = [pair for pair in zip(outputs, (grads, last), strict=True) if pair[1] is not None]
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        [each for each, need in zip(inputs, needs, strict=True) if need],
        [grad for _, grad in pairs],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    rest = iter(found)
    return tuple(next(rest) if need else None for need in needs)
