# SPDX-License-Identifier: Apache-2.0
"""Batch norm, max pooling and a neuron as one function on a CPU, a chunk of rows at a time.

Currents and their gradients exist only while they are in cache: forward reads the numbers and
writes spikes, backward reads the numbers and the spikes' gradients and writes the numbers' own,
twice in one place. The numbers alone are kept. Both passes round as PyTorch's norm and the blocked
neurons do one after the other; sums of gradients may be rounded otherwise.

A norm with positive weights never puts a smaller number above a larger one, so the maximum is taken
first. Where two numbers of a window become the same current, the gradient may go to either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from keymix.ops.neuron import blocked
from keymix.ops.neuron.autograd import (
    Coefficient,
    Neurons,
    save_coefficients,
    saved_coefficients,
)
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.spikes.packed import mark_whole
from keymix.ops.spikes.recompute import refuse_unkept

Grads = Callable[[slice], Tensor]
"""Makes the gradients ``[T, c]`` of the spikes of a part of the row."""


@dataclass(frozen=True)
class Statistics:
    """Mean and variance per channel, of the batch or constants."""

    mean: Tensor
    variance: Tensor
    eps: float
    of_batch: bool

    @property
    def invstd(self) -> Tensor:
        """One over the standard deviation, to the bit as the norm's own kernels have it."""
        if self.of_batch:
            inverse = 1 / (self.variance.double() + self.eps).sqrt()
            return inverse.to(self.variance.dtype)
        return (self.variance + self.eps).rsqrt()


@dataclass(frozen=True)
class MaxPool:
    """Sizes as :class:`torch.nn.MaxPool2d` has them."""

    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any
    ceil_mode: bool

    def __call__(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima of images ``[N, D, H, W]`` and where they were."""
        found: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(y, *self._sizes)
        return found

    def back(self, grad: Tensor, y: Tensor, where: Tensor) -> Tensor:
        """Return the gradient of the images from that of the maxima."""
        found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, y, *self._sizes, where
        )
        return found

    @property
    def _sizes(self) -> tuple[Any, ...]:
        pairs = (self.kernel_size, self.stride, self.padding, self.dilation)
        listed = ([each] * 2 if isinstance(each, int) else list(each) for each in pairs)
        return (*listed, self.ceil_mode)


@dataclass(frozen=True)
class Step:
    """What follows the numbers: their maxima if there is a pool, T steps of them, neurons.

    ``lead`` are the sizes in front of N and D (rows), or of D, H, W (images), T first; numbers of
    one step stand for all T.
    """

    lead: tuple[int, ...]
    how: Dynamics
    pool: MaxPool | None = None


def fits(y: Tensor, weight: Tensor | None, pool: MaxPool | None) -> bool:
    """Whether numbers ``[M, D]`` or ``[N, D, H, W]`` are of the kind that is served here."""
    rows = channels_last(y)
    return (
        y.device.type == "cpu"
        and y.dtype in (torch.float32, torch.float64)
        and rows.numel() > rows.shape[-1]  # one value per channel has no variance
        and rows.is_contiguous()
        and (weight is None or weight.dtype == y.dtype)
        and (pool is None or weight is None or bool((weight > 0).all()))
    )


def channels_last(y: Tensor) -> Tensor:
    """View images ``[N, D, H, W]`` as ``[N, H, W, D]``; rows ``[M, D]`` stay as they are."""
    return y if y.ndim == 2 else y.permute(0, 2, 3, 1)


def batch_statistics(
    y: Tensor, running: tuple[Tensor, Tensor] | None, momentum: float, eps: float
) -> Statistics:
    """Take the statistics of a batch, and move the running ones as batch norms do."""
    with torch.no_grad():
        mean, variance = running or (None, None)
        found = torch.batch_norm_update_stats(y, mean, variance, momentum)
    return Statistics(*found, eps, of_batch=True)


@dataclass(frozen=True)
class Normed:
    """Neurons whose currents are a norm's, channels changing fastest along their row.

    ``rows`` are the numbers ``[S, n, D]`` after the pool, S being T, or 1 for all T.
    """

    rows: Tensor
    statistics: Statistics
    invstd: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(
        cls, rows: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None
    ) -> Normed:
        """Fold a norm into a factor and an addend per channel, rounded as PyTorch's does."""
        mean, invstd = statistics.mean, statistics.invstd
        scale = invstd if weight is None else invstd * weight
        start = torch.zeros_like(mean) if bias is None else bias
        shift = torch.addcmul(start, mean, scale, value=-1)
        return cls(rows, statistics, invstd, scale, shift)

    def neurons(self, steps: int, keep: Coefficient, gain: Coefficient, how: Dynamics) -> Neurons:
        """Lay the neurons out in a row."""
        keep, gain = (each.detach() if isinstance(each, Tensor) else each for each in (keep, gain))
        x = self.rows.flatten(1).expand(steps, -1)
        return Neurons(x, None, keep, gain, how, (self.scale, self.shift))

    def backward(
        self, neurons: Neurons, grads: Tensor | Grads, learned: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of currents, rows, and their sums; those of keep and gain.

        The sums are, per channel, of the gradients and of their products with the distance from
        the mean, in double.
        """
        width = len(self.scale)
        total, product = self.scale.new_zeros(2, width, dtype=torch.float64)

        def add(part: slice, x: Tensor, g: Tensor, room: Tensor) -> None:
            away = room.view(-1, width)
            steps = (each.view(len(x), -1, width).unbind() for each in (x, g))
            for rows, back in zip(*steps, strict=True):
                torch.sub(rows, self.statistics.mean, out=away).mul_(back)
                product.add_(away.sum(0))
                total.add_(back.sum(0))

        grad, _, keep, gain = blocked.backward(neurons, grads, None, (False, *learned), visit=add)
        return grad, total, product, keep, gain

    def through_norm(self, grad: Tensor, y: Tensor, total: Tensor, product: Tensor) -> None:
        """Turn gradients of currents into those of the numbers y, both ``[M D]``, in place."""
        width = len(self.scale)
        count = y.numel() // width
        if self.statistics.of_batch:
            slope = product * self.invstd.double().square() / -count
            level = slope * self.statistics.mean + total / count
            slope, level = ((each * self.scale).to(y.dtype) for each in (slope, level.neg_()))
        spare = y.new_empty(0)
        for start, stop in blocked.chunks(y.numel(), width):
            here = grad[start:stop].view(-1, width)
            if self.statistics.of_batch:
                room = spare.resize_(here.shape)
                torch.addcmul(level, y[start:stop].view(-1, width), slope, out=room)
                torch.addcmul(room, here, self.scale, out=here)
            else:
                here.mul_(self.scale)

    def of_learned(self, total: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of weight and bias."""
        return (product * self.invstd).to(self.scale.dtype), total.to(self.scale.dtype)


class _NormedNeurons(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        keep: Coefficient,
        gain: Coefficient,
        statistics: Statistics,
        step: Step,
    ) -> Tensor:
        coefficients = save_coefficients(ctx, keep, gain)
        z = y if step.pool is None else step.pool(y)[0]
        normed = Normed.of(_steps(z, step), statistics, weight, bias)
        ctx.step, ctx.eps, ctx.of_batch = step, statistics.eps, statistics.of_batch
        ctx.save_for_backward(y, weight, bias, statistics.mean, statistics.variance, *coefficients)
        spikes = _empty(z, step)
        neurons = normed.neurons(step.lead[0], keep, gain, step.how)
        blocked.forward(neurons, False, _flat(spikes, step))
        return spikes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_unkept(grad)
        y, weight, bias, mean, variance, *coefficients = ctx.saved_tensors
        keep, gain = saved_coefficients(ctx, coefficients)
        step: Step = ctx.step
        needs_y, needs_weight, needs_bias, *learned = ctx.needs_input_grad[:5]
        z, where = (y, None) if step.pool is None else step.pool(y)
        statistics = Statistics(mean, variance, ctx.eps, ctx.of_batch)
        normed = Normed.of(_steps(z, step), statistics, weight, bias)
        found, total, product, grad_keep, grad_gain = normed.backward(
            normed.neurons(step.lead[0], keep, gain, step.how),
            _flat(grad, step),
            (learned[0], learned[1]),
        )
        grad_weight, grad_bias = normed.of_learned(total, product)
        back = _through(normed, found, y, z, where, step, total, product) if needs_y else None
        return (
            back,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *(grad_keep, grad_gain, None, None),
        )


def _through(
    normed: Normed,
    found: Tensor,
    y: Tensor,
    z: Tensor,
    where: Tensor | None,
    step: Step,
    total: Tensor,
    product: Tensor,
) -> Tensor:
    """Return the gradient of y from that of the currents, in the memory of which it may lie."""
    rows = channels_last(z).shape
    grad = found.view(rows)
    if where is not None:
        assert step.pool is not None  # it made where
        grad = step.pool.back(grad.permute(0, 3, 1, 2), y, where)
        grad = grad.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    normed.through_norm(grad.view(-1), channels_last(y).view(-1), total, product)
    return grad if y.ndim == 2 else grad.permute(0, 3, 1, 2)


def _steps(z: Tensor, step: Step) -> Tensor:
    """View numbers as ``[S, n, D]``."""
    still = z.ndim == 4 and len(z) != prod(step.lead)
    return channels_last(z).reshape(1 if still else step.lead[0], -1, z.shape[1])


def _empty(z: Tensor, step: Step) -> Tensor:
    """Make room for spikes ``[*lead, D]`` or ``[T, B, D, h, w]``, channels last in memory."""
    if z.ndim == 2:
        return z.new_empty(*step.lead, z.shape[1])
    width, height, across = z.shape[1:]
    last = z.new_empty(*step.lead, height, across, width).movedim(-1, -3)
    return torch.empty_strided(last.shape, last.stride(), dtype=z.dtype)  # no view


def _flat(spikes: Tensor, step: Step) -> Tensor:
    """Lay spikes, or their gradients, out as ``[T, n]``, channels last; a view if they lie so."""
    images = spikes.ndim == len(step.lead) + 3
    turned = spikes.movedim(-3, -1) if images else spikes
    return turned.reshape(step.lead[0], -1)


def normed_neurons(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Statistics,
    keep: Coefficient,
    gain: Coefficient,
    step: Step,
) -> Tensor:
    """Return the spikes of normed, pooled numbers; y alone is kept for the backward pass.

    Statistics of the batch are functions of y, and the gradient goes through them. y is what
    :func:`fits`. Gradients of gradients are refused.
    """
    out: Tensor = _NormedNeurons.apply(y, weight, bias, keep, gain, statistics, step)
    mark_whole(out)
    return out
