# SPDX-License-Identifier: Apache-2.0
"""The same function in plain PyTorch, a chunk of neurons through all steps while it is in cache.

The backward pass is written by hand and saves the currents only: potentials are computed again.
All potentials are held with their sign turned (w = -H), so that PyTorch's ``threshold`` is the
reset: it keeps what lies above -V_th and puts -V_reset in place of the rest.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keymix.ops.neuron.again import again
from keymix.ops.neuron.layout import Dynamics, Rows, batched, held_dtype
from keymix.ops.neuron.surrogate import SHAPES

# Neurons of a chunk: at float32 a step of it is half a MiB, and a call of PyTorch's costs less
# than its work on it. PyTorch gives a thread no less than 32768 elements.
_CHUNK = 131072

Coefficient = float | Tensor


def _power_of_two(number: float) -> bool:
    return abs(math.frexp(number)[0]) == 0.5


@dataclass(frozen=True)
class _Chunk:
    """Neurons ``[T, c]`` and what they are run with; coefficients are numbers or ``[]``, ``[c]``.

    Attributes:
        x: Currents, in the dtype of the potentials.
        v: Potential before the first step; None at rest.
        keep: As the reference has it.
        gain: As the reference has it.
        how: As the reference has it.
        spare: A step's room.
    """

    x: Tensor
    v: Tensor | None
    keep: Coefficient
    gain: Coefficient
    how: Dynamics
    spare: Tensor

    def start(self, w: Tensor) -> None:
        """Set w to the potential before the first step."""
        if self.v is None:
            w.fill_(-self.how.rest)
        else:
            torch.neg(self.v, out=w)

    def charge(self, w: Tensor, t: int) -> None:
        """From the potential after a step to that before the next one's reset, in place.

        Rounded as the reference rounds: a gain that is a power of two rounds nothing, so that one
        operation does for two.
        """
        rest = self.how.rest
        if rest:
            w.add_(rest)
        w.mul_(self.keep)
        if rest:
            w.sub_(rest)
        if isinstance(self.gain, float) and _power_of_two(self.gain):
            w.sub_(self.x[t], alpha=self.gain)
        else:
            w.sub_(torch.mul(self.x[t], self.gain, out=self.spare))

    def reset(self, w: Tensor, out: Tensor) -> Tensor:
        """From the potential before the reset to that after it."""
        how = self.how
        if how.v_reset is not None:
            return torch.threshold(w, -how.v_threshold, -how.v_reset, out=out)
        torch.le(w, -how.v_threshold, out=self.spare)
        return torch.add(w, self.spare, alpha=how.v_threshold, out=out)


def _chunks(count: int) -> list[tuple[int, int]]:
    size = _CHUNK * max(1, torch.get_num_threads() // 2)
    return [(start, min(count, start + size)) for start in range(0, count, size)]


def _cut(value: Coefficient, start: int, stop: int) -> Coefficient:
    return value[start:stop] if isinstance(value, Tensor) and value.ndim else value


def _flattened(value: Coefficient, rows: Rows, dtype: torch.dtype) -> Coefficient:
    return rows.coefficient(value, dtype) if isinstance(value, Tensor) else float(value)


def _forward(
    x: Tensor, v: Tensor | None, keep: Coefficient, gain: Coefficient, how: Dynamics, last: bool
) -> tuple[Tensor, Tensor | None]:
    """Run ``x[T, n]``; spikes in x's dtype and, where wanted, the last potential."""
    steps, count = x.shape
    held = held_dtype(x)
    spikes = torch.empty((steps, count), dtype=x.dtype, device=x.device)
    final = torch.empty(count, dtype=held, device=x.device) if last else None
    cuts = _chunks(count)
    size = cuts[0][1] if cuts else 0
    room = torch.empty((2, size), dtype=held, device=x.device)
    for start, stop in cuts:
        w, spare = room[:, : stop - start].unbind()
        chunk = _Chunk(
            x[:, start:stop].to(held),
            None if v is None else v[start:stop],
            _cut(keep, start, stop),
            _cut(gain, start, stop),
            how,
            spare,
        )
        fired = spikes[:, start:stop].unbind()
        chunk.start(w)
        for t in range(steps):
            chunk.charge(w, t)
            torch.le(w, -how.v_threshold, out=fired[t])
            if t + 1 < steps or final is not None:
                chunk.reset(w, w)
        if final is not None:
            torch.neg(w, out=final[start:stop])
    return spikes, final


def _through(
    chunk: _Chunk,
    w: Tensor,
    grads: Tensor,
    last: Tensor | None,
    g: Tensor,
    other: Tensor,
    scale: float,
) -> None:
    """Write the gradients of the potentials ``w[T, c]`` before the reset into g.

    Args:
        chunk: The neurons.
        w: Their potentials, sign turned.
        grads: Gradients of the spikes.
        last: Gradient of the last potential; None for nothing.
        g: Where the result goes.
        other: A step's room.
        scale: Factor of the result; 1 where ``last`` is not None or the reset is not detached.
    """
    how, spare = chunk.how, chunk.spare
    surrogate = how.surrogate
    shift = w.new_tensor(surrogate.stretch * how.v_threshold)
    torch.add(shift, w, alpha=surrogate.stretch, out=g)
    SHAPES[surrogate.name].bell_(g, grads if how.detach_reset else None)
    if surrogate.peak * scale != 1:
        g.mul_(surrogate.peak * scale)
    for t in range(len(w) - 1, -1, -1):
        here, after = g[t], last
        weight: Coefficient = 1.0  # weight times after: gradient of the potential after step t
        if t + 1 < len(w):
            after, weight = g[t + 1], chunk.keep
        if after is None:
            if not how.detach_reset:
                here.mul_(grads[t])
            continue
        if not how.detach_reset:  # the slope times (grad + after (V_reset - H)), or (- V_th)
            torch.mul(after, weight, out=other)
            if how.v_reset is None:
                torch.mul(other, -how.v_threshold, out=spare)
            else:
                torch.add(w[t], how.v_reset, out=spare).mul_(other)
            here.mul_(spare.add_(grads[t]))
        if how.v_reset is not None:  # nothing passes where a spike fell
            torch.ops.aten.threshold_backward.grad_input(
                after, w[t], -how.v_threshold, grad_input=spare
            )
            after = spare
        if isinstance(weight, Tensor):
            here.add_(torch.mul(after, weight, out=spare))
        else:
            here.add_(after, alpha=weight)


def _backward(
    x: Tensor,
    v: Tensor | None,
    keep: Coefficient,
    gain: Coefficient,
    how: Dynamics,
    grads: Tensor,
    last: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``x[T, n]``, v, keep and gain; the last three where wanted."""
    steps, count = x.shape
    held = held_dtype(x)
    grad_x = torch.empty((steps, count), dtype=x.dtype, device=x.device)
    empty = functools.partial(torch.empty, dtype=held, device=x.device)
    grad_v = empty(count) if wanted[0] else None
    grad_keep = torch.zeros_like(keep) if isinstance(keep, Tensor) else None
    grad_gain = torch.zeros_like(gain) if isinstance(gain, Tensor) else None
    # everything is linear in the gradients of the spikes: where nothing else is asked for, the gain
    # goes in with the slope's factor
    fold = isinstance(gain, float) and last is None and how.detach_reset and not any(wanted)
    cuts = _chunks(count)
    size = cuts[0][1] if cuts else 0
    room = empty((steps + 2, size))
    for start, stop in cuts:
        part = slice(start, stop)
        *_, other, spare = space = room[:, : stop - start].unbind()
        w = room[:steps, : stop - start]
        chunk = _Chunk(
            x[:, part].to(held),
            None if v is None else v[part],
            _cut(keep, start, stop),
            _cut(gain, start, stop),
            how,
            spare,
        )
        chunk.start(space[0])
        for t in range(steps):
            if t:
                chunk.reset(space[t - 1], space[t])
            chunk.charge(space[t], t)
        direct = x.dtype == held
        g = grad_x[:, part] if direct else torch.empty_like(w)
        scale = gain if fold and isinstance(gain, float) else 1.0
        _through(
            chunk, w, grads[:, part].to(held), None if last is None else last[part], g, other, scale
        )
        if grad_v is not None:
            torch.mul(g[0], chunk.keep, out=grad_v[part])
        if wanted[1] and grad_keep is not None:
            into = grad_keep[part] if grad_keep.ndim else grad_keep
            for t in range(steps):
                chunk.start(other) if t == 0 else chunk.reset(space[t - 1], other)
                # turned potential above rest times gradient
                _gather(into, other.add_(how.rest).mul_(g[t]).neg_())
        if wanted[2] and grad_gain is not None:
            into = grad_gain[part] if grad_gain.ndim else grad_gain
            for t in range(steps):
                _gather(into, torch.mul(chunk.x[t], g[t], out=spare))
        if not fold:
            g.mul_(chunk.gain)
        if not direct:
            grad_x[:, part] = g
    return grad_x, grad_v, grad_keep, grad_gain


def _gather(into: Tensor, part: Tensor) -> None:
    """Add a step's share to the gradient of a coefficient ``[]`` or ``[c]``."""
    into.add_(part if into.ndim else part.sum())


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        v: Tensor | None,
        keep: Coefficient,
        gain: Coefficient,
        how: Dynamics,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows, held = Rows.of(x), held_dtype(x)
        tensors = [value if isinstance(value, Tensor) else None for value in (x, v, keep, gain)]
        ctx.save_for_backward(*tensors)
        ctx.how = how
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in (keep, gain)]
        ctx.set_materialize_grads(False)
        spikes, final = _forward(
            rows.steps(x),
            None if v is None else rows.flat(v.to(held).expand(rows.shape)),
            _flattened(keep, rows, held),
            _flattened(gain, rows, held),
            how,
            last,
        )
        return rows.own(spikes), None if final is None else rows.own(final)

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None, last: Tensor | None) -> tuple[Any, ...]:
        x, v, *coefficients = ctx.saved_tensors
        keep, gain = (
            number if tensor is None else tensor
            for number, tensor in zip(ctx.numbers, coefficients, strict=True)
        )
        if torch.is_grad_enabled() or batched(grads, last):  # follow every operation
            return again(x, v, keep, gain, ctx.how, grads, last, ctx.needs_input_grad)
        wanted = ctx.needs_input_grad[1:4]
        return *_gradients(x, v, (keep, gain), ctx.how, grads, last, wanted), None, None


def _gradients(
    x: Tensor,
    v: Tensor | None,
    coefficients: tuple[Coefficient, Coefficient],
    how: Dynamics,
    grads: Tensor | None,
    last: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, v, keep and gain in their own shapes; the last three where wanted."""
    keep, gain = coefficients
    rows, held = Rows.of(x), held_dtype(x)
    if grads is None:
        grads = torch.zeros((), dtype=x.dtype, device=x.device).expand_as(x)
    grad_x, grad_v, grad_keep, grad_gain = _backward(
        rows.steps(x),
        None if v is None else rows.flat(v.to(held).expand(rows.shape)),
        _flattened(keep, rows, held),
        _flattened(gain, rows, held),
        how,
        rows.steps(grads),
        None if last is None else rows.flat(last),
        wanted,
    )
    return (
        rows.back(grad_x),
        None if grad_v is None or v is None else rows.back(grad_v).sum_to_size(v.shape).to(v.dtype),
        _own_shape(grad_keep, keep, rows),
        _own_shape(grad_gain, gain, rows),
    )


def _own_shape(grad: Tensor | None, like: Coefficient, rows: Rows) -> Tensor | None:
    if grad is None or not isinstance(like, Tensor):
        return None
    return rows.coefficient_back(grad, like)


def gradients(
    x: Tensor, grads: Tensor, keep: Coefficient, gain: Coefficient, how: Dynamics
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, keep and gain, from rest, without running for the spikes.

    Args:
        x: Input currents ``[T, ...]``.
        grads: Gradients of the spikes.
        keep: As the reference has it.
        gain: As the reference has it.
        how: The other options.
    """
    wanted = (False, isinstance(keep, Tensor), isinstance(gain, Tensor))
    grad_x, _, grad_keep, grad_gain = _gradients(x, None, (keep, gain), how, grads, None, wanted)
    return grad_x, grad_keep, grad_gain


def integrate_and_fire(
    x: Tensor,
    v: Tensor | None,
    keep: Coefficient,
    gain: Coefficient,
    how: Dynamics,
    last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the reference computes, spikes to the bit.

    Args:
        x: Input currents ``[T, ...]``.
        v: Potential before the first step; at rest if None.
        keep: As the reference has it.
        gain: As the reference has it.
        how: The other options.
        last: Whether the potential after the last step is wanted.

    Returns:
        Spikes in x's memory format, and the last potential or None.
    """
    spikes, final = _Blocked.apply(x, v, keep, gain, how, last)
    return spikes, final
