# SPDX-License-Identifier: Apache-2.0
"""The same function in plain PyTorch, a chunk of neurons through all steps while it is in cache.

The backward pass is written by hand and saves the currents only: potentials are recomputed.
All potentials are stored with their sign turned (w = -H), so that PyTorch's ``threshold`` is the
reset: it keeps what is above -V_th and puts -V_reset in place of the rest.

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
from keymix.ops.neuron.reference import potential_dtype
from keymix.ops.neuron.surrogate import SHAPES

# Neurons of a chunk: at float32 a step of it is half a MiB, and a call of PyTorch's costs less
# than its work on it. PyTorch gives a thread no less than 32768 elements.
CHUNK = 131072
_MOST_BITS = 32  # that potentials grow by

Visit = Callable[[slice, Tensor, Tensor, Tensor], None]


def _power_of_two(number: float) -> bool:
    return abs(math.frexp(number)[0]) == 0.5


@dataclass(frozen=True)
class _Chunk(Neurons):
    """Some of the neurons, currents in the dtype of potentials, with memory for one step."""

    spare: Tensor = field(kw_only=True)

    def current(self, t: int) -> Tensor:
        """Return the currents of a step; they may lie in the spare memory."""
        if self.affine is None:
            return self.x[t]
        scale, shift = self.affine
        rows = self.x[t].view(-1, len(scale))
        torch.addcmul(shift, rows, scale, out=self.spare.view_as(rows))
        return self.spare

    @cached_property
    def grows(self) -> bool:
        """Whether potentials are stored times keep^-t."""
        keep = self.keep
        return (
            isinstance(keep, float)
            and _power_of_two(keep)
            and not self.how.rest
            and self.v is None
            and abs(math.log2(keep)) * len(self.x) <= _MOST_BITS
        )

    def unit(self, t: int) -> float:
        """What the potentials of a step are stored times."""
        return self.keep**-t if self.grows and isinstance(self.keep, float) else 1.0

    def potentials(self, w: Tensor) -> None:
        """Fill w with the potentials ``[T, c]`` before each reset."""
        for t in range(len(w)):
            if t:
                self.reset(w[t - 1], t - 1, w[t])
            self.charge(w[t], t)

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
        rest, gain, current = self.how.rest, self.gain, self.current(t)
        if t == 0 and self.v is None and not rest:
            torch.mul(current, -gain, out=w)
            return
        if t == 0:
            self.start(w)
        if rest:
            w.add_(rest)
        if self.grows:
            gain = gain * self.unit(t)
        else:
            w.mul_(self.keep)
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


def chunks(count: int, whole: int = 1) -> list[tuple[int, int]]:
    """Cut ``count`` neurons into parts that stay in cache, each of whole groups of ``whole``."""
    size = CHUNK * max(1, torch.get_num_threads() // 2)
    parts = max(round(count / size), 1)  # as equal as can be: a short one costs as many calls
    size = max(-(-count // (parts * whole)), 1) * whole
    return [(start, min(count, start + size)) for start in range(0, count, size)]


def _empty(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=potential_dtype(x), device=x.device)


def _cut(neurons: Neurons, rows: int) -> Iterator[tuple[slice, Tensor, _Chunk]]:
    """Yield each part of the row, memory of ``rows`` steps of it, and its chunk with one more."""

    def part_of(value: Coefficient, part: slice) -> Coefficient:
        return value[part] if isinstance(value, Tensor) and value.ndim else value

    whole = 1 if neurons.affine is None else len(neurons.affine[0])
    cuts = chunks(neurons.x.shape[1], whole)
    room = _empty(neurons.x, rows + 1, cuts[0][1] if cuts else 0)
    for start, stop in cuts:
        part, space = slice(start, stop), room[:, : stop - start]
        chunk = _Chunk(
            neurons.x[:, part].to(room.dtype),
            None if neurons.v is None else neurons.v[part],
            part_of(neurons.keep, part),
            part_of(neurons.gain, part),
            neurons.how,
            neurons.affine,
            spare=space[rows],
        )
        yield part, space[:rows], chunk


def forward(
    neurons: Neurons, last: bool, spikes: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Spikes ``[T, n]``, in the memory given if any, and the last potential ``[n]`` if wanted."""
    x = neurons.x
    if spikes is None:
        spikes = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = _empty(x, x.shape[1]) if last else None
    for part, space, chunk in _cut(neurons, 1):
        _fire(chunk, space[0], spikes[:, part], None if final is None else final[part])
    return spikes, final


def visit_spikes(neurons: Neurons, visit: Callable[[slice, Tensor], None]) -> None:
    """Call ``visit`` with each part of the row and its spikes ``[T, c]``, which are not kept."""
    steps = len(neurons.x)
    for part, space, chunk in _cut(neurons, 1 + steps):
        _fire(chunk, space[0], space[1:], None)
        visit(part, space[1:])


def _fire(chunk: _Chunk, w: Tensor, spikes: Tensor, last: Tensor | None) -> None:
    """Write spikes ``[T, c]`` and, if wanted, the last potential; w is memory of a step."""
    steps = len(spikes)
    for t, fired in enumerate(spikes):
        chunk.charge(w, t)
        torch.le(w, -chunk.how.v_threshold * chunk.unit(t), out=fired)
        if t + 1 < steps or last is not None:
            chunk.reset(w, t, w)
    if last is not None:
        torch.div(w, -chunk.unit(steps - 1), out=last)


def _through(
    chunk: _Chunk,
    w: Tensor,
    grads: Tensor,
    last: Tensor | None,
    g: Tensor,
    other: Tensor,
    scale: float,
) -> None:
    """Write the gradients of the potentials ``w[T, c]`` (sign turned) before the reset into g.

    ``grads`` and ``last`` are those of the spikes and of the last potential, None for zero; other
    is memory of a step. ``scale`` is a factor of the result; 1 where ``last`` is not None or the
    reset is not detached.
    """
    how, spare = chunk.how, chunk.spare
    surrogate = how.surrogate
    shift = w.new_tensor(surrogate.stretch * how.v_threshold)
    if chunk.grows and chunk.keep != 1:
        for t in range(len(w)):
            torch.add(shift, w[t], alpha=surrogate.stretch / chunk.unit(t), out=g[t])
    else:
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
                torch.mul(w[t], 1 / chunk.unit(t), out=spare).add_(how.v_reset).mul_(other)
            here.mul_(spare.add_(grads[t]))
        if how.v_reset is not None:  # nothing passes where a spike fell
            torch.ops.aten.threshold_backward.grad_input(
                after, w[t], -how.v_threshold * chunk.unit(t), grad_input=spare
            )
            after = spare
        if isinstance(weight, Tensor):
            here.add_(torch.mul(after, weight, out=spare))
        else:
            here.add_(after, alpha=weight)


def backward(
    neurons: Neurons,
    grads: Tensor | Callable[[slice], Tensor],
    last: Tensor | None,
    wanted: Sequence[bool],
    *,
    visit: Visit | None = None,
) -> Gradients:
    """Gradients of the currents, v, keep and gain; the last three where wanted.

    ``grads`` may be a function that makes those of a part of the row, ``[T, c]``. ``visit`` is
    called with each part, its x, the gradients of its currents while these are in cache, and memory
    of the same size. With an affine map and one step seen T times gradients are sums, ``[1, n]``.
    """
    x, keep, gain, how = neurons.x, neurons.keep, neurons.gain, neurons.how
    steps, count = x.shape
    still = neurons.affine is not None and steps > 1 and x.stride(0) == 0
    seen = 1 if still else steps
    grad_x = torch.empty((seen, count), dtype=x.dtype, device=x.device)
    grad_v = _empty(x, count) if wanted[0] else None
    grad_keep = torch.zeros_like(keep) if wanted[1] and isinstance(keep, Tensor) else None
    grad_gain = torch.zeros_like(gain) if wanted[2] and isinstance(gain, Tensor) else None
    # everything is linear in the gradients of the spikes: where nothing else is asked for, the gain
    # goes in with the slope's factor
    fold = isinstance(gain, float) and last is None and how.detach_reset and not any(wanted)
    direct = x.dtype == potential_dtype(x) and not still
    for part, space, chunk in _cut(neurons, steps + 1 if direct else 2 * steps + 1):
        w, other = space[:steps], space[steps]
        chunk.potentials(w)
        g = grad_x[:, part] if direct else space[steps + 1 :]
        scale = gain if fold and isinstance(gain, float) else 1.0
        after = None if last is None else last[part]
        given = grads(part) if callable(grads) else grads[:, part]
        _through(chunk, w, given.to(w.dtype), after, g, other, scale)
        if grad_v is not None:
            torch.mul(g[0], chunk.keep, out=grad_v[part])
        if grad_keep is not None:
            for t in range(steps):
                chunk.start(other) if t == 0 else chunk.reset(w[t - 1], t - 1, other)
                # turned potential above rest times gradient
                _add(grad_keep, part, other.add_(how.rest).mul_(g[t]).neg_())
        if grad_gain is not None:
            for t in range(steps):
                _add(grad_gain, part, torch.mul(chunk.current(t), g[t], out=chunk.spare))
        if not fold:
            g.mul_(chunk.gain)
        if not direct:
            grad_x[:, part] = g.sum(0, keepdim=True) if still else g
        if visit is not None:
            visit(part, chunk.x[:seen], grad_x[:, part], w[:seen])
    return grad_x, grad_v, grad_keep, grad_gain


def _add(grad: Tensor, part: slice, share: Tensor) -> None:
    """Add a step's share ``[c]`` to the gradient of a coefficient ``[]`` or ``[n]``."""
    into = grad[part] if grad.ndim else grad
    into.add_(share if into.ndim else share.sum())
