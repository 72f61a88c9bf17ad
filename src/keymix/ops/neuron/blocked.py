# SPDX-License-Identifier: Apache-2.0
"""The same function in plain PyTorch, a chunk of neurons through all steps while it is in cache.

The backward pass is written by hand and saves the currents only: potentials are recomputed.
All potentials are stored with their sign turned (w = -H), so that PyTorch's ``threshold`` is the
reset: it keeps what is above -V_th and puts -V_reset in place of the rest. In the backward pass
they lie in the memory of the result, and become gradients step by step, the last one first.

A leak by a power of two, such as LIF's at tau 2, costs nothing: potentials are stored times
keep^-t, which rounds nothing, and the threshold grows instead. Every call of PyTorch's counts: at a
few chunks they take as long as the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from keymix.ops.neuron.autograd import Coefficient, Gradients, Neurons
from keymix.ops.neuron.reference import Dynamics, potential_dtype
from keymix.ops.neuron.surrogate import SHAPES

# Neurons of a chunk: at float32 a step of it is a MiB, and a call of PyTorch's costs less
# than its work on it. PyTorch gives a thread no less than 32768 elements.
CHUNK = 262144
_MOST_BITS = 32  # that potentials grow by


def _power_of_two(number: Coefficient) -> bool:
    return isinstance(number, float) and abs(math.frexp(number)[0]) == 0.5


def _growth(neurons: Neurons) -> list[float] | None:
    """What the potentials of each step are stored times; None if the leak is multiplied by."""
    keep, steps = neurons.keep, len(neurons.x)
    if not isinstance(keep, float) or not _power_of_two(keep):
        return None
    if neurons.how.rest or neurons.v is not None or abs(math.log2(keep)) * steps > _MOST_BITS:
        return None
    return [keep**-t for t in range(steps)]


@dataclass(frozen=True)
class _Chunk(Neurons):
    """Some of the neurons, currents in the dtype of potentials, with memory for one step.

    ``growth`` is what potentials are stored times, by step; None where they are as they are.
    """

    spare: Tensor = field(kw_only=True)
    growth: list[float] | None = field(kw_only=True)

    @cached_property
    def steps(self) -> Sequence[Tensor]:
        """The rows of x: a view taken each time costs as much as a small step."""
        return self.x.unbind()

    def unit(self, t: int) -> float:
        """What the potentials of a step are stored times."""
        return 1.0 if self.growth is None else self.growth[t]

    def potentials(self, rows: Sequence[Tensor]) -> None:
        """Fill T rows ``[c]`` with the potentials before each reset."""
        for t, w in enumerate(rows):
            if t:
                self.reset(rows[t - 1], t - 1, w)
            self.charge(w, t)

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
        rest, gain = self.how.rest, self.gain
        if t == 0 and self.v is None and not rest:
            torch.mul(self.steps[t], -gain, out=w)
            return
        current = self.steps[t]
        if t == 0:
            self.start(w)
        if rest:
            w.add_(rest)
        if self.growth is None:
            w.mul_(self.keep)
        else:
            gain = gain * self.growth[t]
        if rest:
            w.sub_(rest)
        if isinstance(gain, float) and _power_of_two(gain):
            w.sub_(current, alpha=gain)
        else:
            w.sub_(torch.mul(current, gain, out=self.spare))

    def reset(self, w: Tensor, t: int, out: Tensor) -> Tensor:
        """From the potential before the reset of a step to that after it."""
        how, threshold = self.how, self.how.v_threshold * self.unit(t)
        if how.v_reset is not None:
            return torch.threshold(w, -threshold, -how.v_reset, out=out)
        torch.le(w, -threshold, out=self.spare)
        return torch.add(w, self.spare, alpha=threshold, out=out)


def _chunks(count: int) -> list[tuple[int, int]]:
    """Cut ``count`` neurons into parts that stay in cache."""
    size = CHUNK * max(1, torch.get_num_threads() // 2)
    parts = max(round(count / size), 1)  # as equal as can be: a short one costs as many calls
    size = max(-(-count // parts), 1)
    return [(start, min(count, start + size)) for start in range(0, count, size)]


def _empty(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=potential_dtype(x), device=x.device)


def _cut(neurons: Neurons, rows: int) -> Iterator[tuple[slice, Tensor, _Chunk]]:
    """Yield each part of the row, memory of ``rows`` steps of it, and its chunk with one more."""

    def part_of(value: Coefficient, part: slice) -> Coefficient:
        return value[part] if isinstance(value, Tensor) and value.ndim else value

    cuts = _chunks(neurons.x.shape[1])
    room = _empty(neurons.x, rows + 1, cuts[0][1] if cuts else 0)
    growth = _growth(neurons)
    for start, stop in cuts:
        part, space = slice(start, stop), room[:, : stop - start]
        chunk = _Chunk(
            neurons.x[:, part].to(room.dtype),
            None if neurons.v is None else neurons.v[part],
            part_of(neurons.keep, part),
            part_of(neurons.gain, part),
            neurons.how,
            spare=space[rows],
            growth=growth,
        )
        yield part, space[:rows], chunk


def forward(neurons: Neurons, last: bool) -> tuple[Tensor, Tensor | None]:
    """Spikes ``[T, n]`` and the last potential ``[n]`` if wanted."""
    x = neurons.x
    spikes = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = _empty(x, x.shape[1]) if last else None
    for part, space, chunk in _cut(neurons, 1):
        _fire(chunk, space[0], spikes[:, part], None if final is None else final[part])
    return spikes, final


def _fire(chunk: _Chunk, w: Tensor, spikes: Tensor, last: Tensor | None) -> None:
    """Write spikes ``[T, c]`` and, if wanted, the last potential; w is memory of a step."""
    steps = len(spikes)
    for t, fired in enumerate(spikes.unbind()):
        chunk.charge(w, t)
        torch.le(w, -chunk.how.v_threshold * chunk.unit(t), out=fired)
        if t + 1 < steps or last is not None:
            chunk.reset(w, t, w)
    if last is not None:
        torch.div(w, -chunk.unit(steps - 1), out=last)


def _through(
    chunk: _Chunk,
    rows: Sequence[Tensor],
    grads: Sequence[Tensor],
    last: Tensor | None,
    other: Tensor,
    scale: float,
    after_step: Callable[[int], None],
) -> None:
    """Turn potentials (T rows ``[c]``, sign turned) before resets into their gradients, in place.

    ``grads`` and ``last`` are those of the spikes and of the last potential, None for zero; other
    is memory of a step. ``scale`` is a factor of the result; 1 where ``last`` is not None or the
    reset is not detached. The last step comes first, and ``after_step`` is called behind each, when
    the rows of those before still hold potentials.
    """
    how, spare = chunk.how, chunk.spare
    surrogate = how.surrogate
    # u = stretch (V_th - H), or without the stretch where it would be rounded, is positive exactly
    # where no spike fell, and takes the potential's place
    whole = _power_of_two(surrogate.stretch)
    unit, stretch = (surrogate.stretch, 1.0) if whole else (1.0, surrogate.stretch)
    bell_, peak = SHAPES[surrogate.name].bell_, surrogate.peak * scale
    threshold = rows[0].new_tensor(unit * how.v_threshold)
    after = last
    weight: Coefficient = 1.0  # weight times after: gradient of the potential after step t
    for t in range(len(rows) - 1, -1, -1):
        here, grad = rows[t], grads[t]
        if after is not None and not how.detach_reset:  # grad + after (V_reset - H), or (- V_th)
            torch.mul(after, weight, out=other)
            if how.v_reset is None:
                other.mul_(-how.v_threshold)
            else:
                other.mul_(torch.mul(here, 1 / chunk.unit(t), out=spare).add_(how.v_reset))
            grad = other.add_(grad)
        torch.add(threshold, here, alpha=unit / chunk.unit(t), out=here)
        passed = None if after is None else _passed(after, weight, here, how, spare)
        bell_(here, stretch, grad)
        if passed is not None:
            torch.add(passed, here, alpha=peak, out=here)
        elif peak != 1:
            here.mul_(peak)
        after, weight = here, chunk.keep
        after_step(t)


def _passed(after: Tensor, weight: Coefficient, u: Tensor, how: Dynamics, out: Tensor) -> Tensor:
    """What weight times the gradient after a reset adds to that before: none where u <= 0."""
    if how.v_reset is None:
        return torch.mul(after, weight, out=out)
    if isinstance(weight, Tensor):
        torch.ops.aten.threshold_backward.grad_input(after, u, 0, grad_input=out)
        return out.mul_(weight)
    # the backward pass of ELU with slope 0 below 0: threshold's, times a factor at no cost
    torch.ops.aten.elu_backward.grad_input(after, 0, weight, 0, True, u, grad_input=out)
    return out


def backward(
    neurons: Neurons, grads: Tensor, last: Tensor | None, wanted: Sequence[bool]
) -> Gradients:
    """Gradients of the currents, v, keep and gain; the last three where wanted."""
    x, keep, gain, how = neurons.x, neurons.keep, neurons.gain, neurons.how
    steps, count = x.shape
    grad_x = torch.empty((steps, count), dtype=x.dtype, device=x.device)
    grad_v = _empty(x, count) if wanted[0] else None
    grad_keep = torch.zeros_like(keep) if wanted[1] and isinstance(keep, Tensor) else None
    grad_gain = torch.zeros_like(gain) if wanted[2] and isinstance(gain, Tensor) else None
    # everything is linear in the gradients of the spikes: where nothing else is asked for, the gain
    # goes in with the slope's factor
    fold = isinstance(gain, float) and last is None and how.detach_reset and not any(wanted)
    scale = gain if fold and isinstance(gain, float) else 1.0
    direct = x.dtype == potential_dtype(x)  # potentials lie where gradients will
    for part, space, chunk in _cut(neurons, 1 if direct else 1 + steps):
        other = space[0]
        g = grad_x[:, part] if direct else space[1:]
        rows = g.unbind()

        def learn(
            t: int,
            part: slice = part,
            chunk: _Chunk = chunk,
            rows: Sequence[Tensor] = rows,
            other: Tensor = other,
        ) -> None:
            if grad_keep is not None:
                chunk.start(other) if t == 0 else chunk.reset(rows[t - 1], t - 1, other)
                # turned potential above rest times gradient
                _add(grad_keep, part, other.add_(how.rest).mul_(rows[t]).neg_())
            if grad_gain is not None:
                _add(grad_gain, part, torch.mul(chunk.steps[t], rows[t], out=chunk.spare))

        chunk.potentials(rows)
        given = grads[:, part].to(g.dtype).unbind()
        after = None if last is None else last[part]
        _through(chunk, rows, given, after, other, scale, learn)
        if grad_v is not None:
            torch.mul(rows[0], chunk.keep, out=grad_v[part])
        if not fold:
            g.mul_(chunk.gain)
        if not direct:
            grad_x[:, part] = g
    return grad_x, grad_v, grad_keep, grad_gain


def _add(grad: Tensor, part: slice, share: Tensor) -> None:
    """Add a step's share ``[c]`` to the gradient of a coefficient ``[]`` or ``[n]``."""
    into = grad[part] if grad.ndim else grad
    into.add_(share if into.ndim else share.sum())
