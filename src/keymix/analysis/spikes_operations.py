# SPDX-License-Identifier: Apache-2.0
"""Operations of a forward pass and what drives them: additions by spikes, or multiply-adds.

The rule. An operation is driven by the values that go into it, over all batches together:

- *0 and 1*: each 1 is added to every result that it goes into. With a fan-out of f, s spikes make
  s f additions. What is 0 costs nothing.
- *whole numbers*, such as spikes that a shortcut added: a value n counts as n additions, and at
  least as one.
- *real numbers*: every multiply-add is made.

Of a product of two activations the plainer factor drives: 0 and 1 before whole numbers, of two
alike the one that is used less. Where both are 0 and 1, a 1 is added wherever a 1 meets a 1.

:class:`OperationCounter` sees PyTorch's operations as they run, under the innermost module that
runs; a :class:`_Tally` adds one of them up over batches and decides by the rule at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from keymix.analysis.counting import cannot_count, computes, flop_counter
from keymix.analysis.energy import Energy
from keymix.analysis.spikes_record import EnergyBounds, InputValues, Kind, OperationReading, What
from keymix.analysis.study_record import joined

aten = torch.ops.aten

LARGEST = 8
"""Histograms count values up to here one by one; the last cell holds all from here on."""

_ORDER: tuple[Kind, ...] = ("binary", "counts", "real")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a model, on one image over all time steps.

    Attributes:
        path: The innermost module that ran it.
        what: ``"conv"`` and ``"linear"`` have weights; ``"product"`` is of two activations, as in
            spiking self attention; ``"sum"`` adds spikes up, as Q-K attention does with Q;
            ``"norm"`` is a batch norm that is not folded; ``"other"`` has a formula, no more.
        input: Values that drive it: ``"binary"`` (0 and 1), ``"counts"`` (whole numbers, such as
            spikes that a shortcut added), ``"real"``.
        values: Mean, share that is not 0, and shares of the values 0, 1, 2, …; None for "norm"
            and "other".
        dense: Multiply-adds if every input counted, over all steps.
        ann: Multiply-adds of it in the ANN counterpart, which has one step.
        macs: Multiply-adds that have to be made: all of ``dense`` where the input is real.
        acs: Additions, a spike of value v counted as v (synaptic operations, SOPs).
        acs_low: Additions if an input costs one whatever its value; equals ``acs`` if binary.
    """

    path: str
    what: What
    input: Kind
    values: InputValues | None
    dense: float
    ann: float
    macs: float
    acs: float
    acs_low: float

    def energy(self, cost: Energy) -> tuple[float, float, float]:
        """Return energy in pJ: lower bound, every spike one addition, upper bound.

        The lower bound takes one addition for an input above one too, the upper bound one
        multiply-add; all three agree where the input is binary, or real.
        """
        if self.input == "real":
            return (self.macs * cost.mac,) * 3
        middle = self.acs * cost.ac
        if self.input == "binary":
            return (middle,) * 3
        multiplied = 0.0 if self.what == "sum" else self.acs_low * cost.mac
        return self.acs_low * cost.ac, middle, max(middle, multiplied)

    def reading(self, cost: Energy) -> OperationReading:
        """Return it as a record has it, with its energy."""
        return joined(OperationReading, self, energy=EnergyBounds.of(self.energy(cost)))


class _Factor:
    """What goes into an operation.

    `uses` are the results that values other than 0 go into; in `spikes` a value n counts n times.
    """

    def __init__(self) -> None:
        self.values = Values()
        self.uses = self.spikes = 0.0

    def read(self, x: Tensor, fan_out: int) -> None:
        """Read values, each of which goes into ``fan_out`` results."""
        nonzero, total = self.values.add(x)
        self.used(nonzero * fan_out, total * fan_out)

    def used(self, uses: float, spikes: float) -> None:
        """Add up uses."""
        self.uses += uses
        self.spikes += spikes


class _Tally:
    """Adds up one operation over batches; what drives it is decided when all were seen.

    `other` is the second factor of a product of two activations, `meetings` how often a 1 of both
    met. `once` are multiply-adds of calls behind the mean over steps; `same` says whether the input
    was the same at every step.
    """

    def __init__(self, path: str, what: What) -> None:
        self.path, self.what = path, what
        self.input, self.other = _Factor(), _Factor()
        self.meetings = self.dense = self.once = 0.0
        self.calls: list[tuple[float, int]] = []
        self.same = True

    def end_batch(self, images: int) -> None:
        """Add up the calls of a batch; one call with a row per image has no steps in it."""
        total = sum(macs for macs, _ in self.calls)
        self.dense += total
        if len(self.calls) == 1 and self.calls[0][1] == images:
            self.once += total
        self.calls = []

    def result(self, images: int, steps: int) -> Operation:
        """Return it for one image."""
        drives, acs, low = self._driver()
        real = drives.kind == "real"
        return Operation(
            path=self.path,
            what=self.what,
            input=drives.kind,
            values=drives.reading() if drives.elements else None,
            dense=self.dense / images,
            ann=(self.once + (self.dense - self.once) / steps) / images,
            macs=self.dense / images if real else 0.0,
            acs=0.0 if real else acs / images,
            acs_low=0.0 if real else low / images,
        )

    def _driver(self) -> tuple[Values, float, float]:
        """Return the values that drive it, its additions, and how few they may be."""
        factors = (self.input, self.other) if self.other.values.elements else (self.input,)
        if len(factors) == 2 and all(f.values.kind == "binary" for f in factors):
            return self.input.values, self.meetings, self.meetings

        def price(factor: _Factor) -> tuple[int, float]:
            kind = factor.values.kind
            return _ORDER.index(kind), 0.0 if kind == "real" else factor.uses

        plainest = min(factors, key=price)
        return plainest.values, plainest.spikes, plainest.uses


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation and notes what drives those that cost something.

    Nothing is counted inside of `neurons`, nor while `paused`; steps are outermost in all tensors.
    """

    def __init__(self, model: nn.Module, neurons: Collection[str], steps: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._neurons = model, frozenset(neurons)
        self._weights: set[int] = set()
        self._formulas = flop_counter().flop_registry
        self._tallies: dict[tuple[str, int], _Tally] = {}
        self._running: list[list[Any]] = []
        self.paused = False
        self.steps = steps

    @contextlib.contextmanager
    def listening(self, images: int) -> Iterator[None]:
        """Follow which module runs, innermost last; count what runs within."""
        self._running = [["", 0]]
        self._weights = {p.untyped_storage()._cdata for p in self._model.parameters()}
        with contextlib.ExitStack() as stack:
            for path, module in self._model.named_modules():
                for handle in (
                    module.register_forward_pre_hook(self._enter(path), prepend=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ):
                    stack.callback(handle.remove)
            stack.enter_context(self)
            yield
        for tally in self._tallies.values():
            tally.end_batch(images)

    def _enter(self, path: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            self._running.append([path, 0])

        return hook

    def _leave(self, module: nn.Module, _args: Any, out: Any) -> None:
        path, _ = self._running.pop()
        if isinstance(module, _BatchNorm) and isinstance(out, Tensor):
            self._tally(path, 0, "norm").calls.append((out.numel(), len(out)))

    def _tally(self, path: str, number: int, what: What) -> _Tally:
        return self._tallies.setdefault((path, number), _Tally(path, what))

    def _next(self, what: What) -> _Tally:
        running = self._running[-1]
        running[1] += 1
        return self._tally(running[0], running[1], what)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or any(path in self._neurons for path, _ in self._running):
            return func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        out = func(*args, **kwargs)
        if packet is aten.sum:
            self._sum(args[0], out)
        elif packet is aten.convolution:
            self._convolution(args, out)
        elif packet in _FACTORS:
            first = _FACTORS[packet]
            self._product(*args[first : first + 2])
        elif packet in self._formulas:
            tally = self._next("other")
            flops = self._formulas[packet](*args, **kwargs, out_val=out)
            tally.calls.append((flops // 2, len(out)))
            tally.input.values.kind = "real"
        elif computes(func):
            raise cannot_count(str(packet))
        return out

    def _sum(self, x: Tensor, out: Tensor) -> None:
        if out.numel() == x.numel():
            return
        self._next("sum").input.read(x, 1)

    def _convolution(self, args: tuple[Any, ...], out: Tensor) -> None:
        x, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
        tally = self._next("conv")
        tally.input.values.add(x)
        tally.input.used(*conv_uses(x, weight, out, stride, padding, dilation, transposed, groups))
        tally.calls.append((conv_macs(weight, x, out, transposed), len(x)))
        self._compare_steps(tally, x)

    def _product(self, a: Tensor, b: Tensor) -> None:
        a = a if a.ndim > 1 else a[None]
        b = b if b.ndim > 1 else b[:, None]
        weights = [t.untyped_storage()._cdata in self._weights for t in (a, b)]
        tally = self._next("linear" if any(weights) else "product")
        tally.calls.append((a.numel() * b.shape[-1], len(a)))
        if weights[0]:
            tally.input.read(b, a.shape[-2])
            tally.same = False  # where its steps lie is unknown
            return
        tally.input.read(a, b.shape[-1])
        self._compare_steps(tally, a)
        if not weights[1]:
            tally.other.read(b, a.shape[-2])
            tally.meetings += met(a, b)

    def _compare_steps(self, tally: _Tally, x: Tensor) -> None:
        """Note whether a layer is given the same at every step, which it need not work out."""
        if not self.steps or len(x) % self.steps:
            tally.same = False
        elif tally.same:
            first, *others = x.chunk(self.steps)
            tally.same = all(torch.equal(first, other) for other in others)

    def same_at_every_step(self) -> tuple[str, ...]:
        """List the paths of layers whose real-valued input never changed from step to step."""
        if not self.steps or self.steps == 1:
            return ()
        weighted = [t for t in self._tallies.values() if t.what in ("conv", "linear")]
        return tuple(t.path for t in weighted if t.same and t.input.values.kind == "real")

    def results(self, images: int, steps: int, *, norms: bool) -> tuple[Operation, ...]:
        """Return the operations for one image, in order; `norms` are those of batch norms too."""
        found = []
        for tally in self._tallies.values():
            if tally.what == "norm":
                if not norms:
                    continue
                tally.input.values.kind = "real"
            made = tally.result(images, steps)
            if made.what != "sum" or made.input != "real":
                found.append(made)
        return tuple(found)


# Operation to the position of the first of its two factors
_FACTORS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.mv: 0,
    aten.dot: 0,
    aten.addmm: 1,
    aten.addmv: 1,
    aten.baddbmm: 1,
    aten.addbmm: 1,
}


def conv_uses(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> tuple[float, float]:
    """Count the weights that inputs which are not 0 meet, and the same weighed by their values.

    An input ``[B, C, *size]`` at the border meets fewer weights than one in the middle: padding
    meets none. Strides, paddings and dilations are one for each axis, or one for all.
    """
    sizes, kernel = x.shape[2:], weight.shape[2:]
    across = weight.shape[1] if transposed else weight.shape[0] // groups
    spots = torch.ones((), dtype=torch.float64, device=x.device)
    for axis in range(len(sizes)):
        met = _met(
            sizes[axis],
            out.shape[2 + axis],
            kernel[axis],
            *(each[axis if len(each) > 1 else 0] for each in (stride, padding, dilation)),
            transposed=transposed,
        )
        spots = spots[..., None] * met.to(spots)
    nonzero = torch.count_nonzero(x, dim=(0, 1)).to(spots)
    total = x.sum(dim=(0, 1), dtype=torch.float64)
    return float((nonzero * spots).sum()) * across, float((total * spots).sum()) * across


def _met(
    size: int, out: int, kernel: int, stride: int, padding: int, dilation: int, *, transposed: bool
) -> Tensor:
    """Return for each place of an axis how many outputs it goes into."""
    taps = torch.arange(kernel) * dilation
    if transposed:
        reached = torch.arange(size)[:, None] * stride - padding + taps
        return ((reached >= 0) & (reached < out)).sum(1)
    read = (torch.arange(out)[:, None] * stride - padding + taps).flatten()
    return torch.bincount(read[(read >= 0) & (read < size)], minlength=size)


def conv_macs(weight: Tensor, x: Tensor, out: Tensor, transposed: bool) -> int:
    """Return the multiply-adds of a convolution, padding included, as everybody counts them."""
    return prod(weight.shape[1:]) * (x.numel() if transposed else out.numel())


def met(a: Tensor, b: Tensor) -> float:
    """Sum up a matrix product ``[*, m, k] @ [*, k, n]``: of 0 and 1, how often a 1 meets a 1."""
    left, right = a.sum(-2, dtype=torch.float64), b.sum(-1, dtype=torch.float64)
    return float((left * right).sum())


def kind_of(x: Tensor) -> Kind:
    """Say what kind of values a tensor has."""
    if x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all()):
        return "binary"
    return "counts" if bool(((x >= 0) & (x == x.round())).all()) else "real"


class Values:
    """Counts the values of tensors: the least plain kind, the sum, and how many were 0, 1, 2, …."""

    def __init__(self) -> None:
        self.kind: Kind = "binary"
        self.elements = self.nonzero = 0
        self.total = 0.0
        self.histogram = torch.zeros(LARGEST + 1, dtype=torch.int64)

    def add(self, x: Tensor) -> tuple[float, float]:
        """Count the values of a tensor; return how many are not 0, and their sum."""
        kind = kind_of(x)
        self.kind = max(self.kind, kind, key=_ORDER.index)
        nonzero, total = int(torch.count_nonzero(x)), float(x.sum(dtype=torch.float64))
        self.elements += x.numel()
        self.nonzero += nonzero
        self.total += total
        if kind == "binary":
            self.histogram[0] += x.numel() - nonzero
            self.histogram[1] += nonzero
        elif kind == "counts":
            cells = x.flatten().clamp(max=LARGEST).long()
            self.histogram += torch.bincount(cells, minlength=LARGEST + 1).cpu()
        return float(nonzero), total

    @property
    def rate(self) -> float:
        """Mean value: of spikes, how many an element carries."""
        return self.total / self.elements

    def reading(self) -> InputValues:
        """Return what was counted as a record has it."""
        shares = None
        if self.kind != "real":
            cells: list[int] = self.histogram.tolist()
            last = max(i for i, cell in enumerate(cells) if cell or i == 1)
            shares = tuple(cell / self.elements for cell in cells[: last + 1])
        return InputValues(
            kind=self.kind, mean=self.rate, nonzero=self.nonzero / self.elements, shares=shares
        )
