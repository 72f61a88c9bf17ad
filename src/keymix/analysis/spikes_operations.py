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
from collections.abc import Collection, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from keymix.analysis.counting import cannot_count, computes, flop_counter
from keymix.analysis.spikes_record import InputValues, Kind, Operation, What

aten = torch.ops.aten

LARGEST = 8
"""Histograms count values up to here one by one; the last cell holds all from here on."""

_ORDER: tuple[Kind, ...] = ("binary", "counts", "real")


class _Tally:
    """Adds up one operation over batches; what drives it is decided when all were seen.

    `other` is the second factor of a product of two activations, `meetings` how often a 1 of both
    met. `once` are multiply-adds of calls behind the mean over steps; `same` says whether the input
    was the same at every step.
    """

    def __init__(self, path: str, what: What) -> None:
        self.path, self.what = path, what
        self.input, self.other = Values(), Values()
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
        drives = self._driver()
        real = drives.kind == "real"
        acs, low = (0.0, 0.0) if real else (drives.spikes, drives.uses)
        if self.other.elements and self.input.kind == self.other.kind == "binary":
            acs = low = self.meetings
        return Operation(
            path=self.path,
            what=self.what,
            input=drives.kind,
            values=drives.reading() if drives.elements else None,
            dense=self.dense / images,
            ann=(self.once + (self.dense - self.once) / steps) / images,
            macs=self.dense / images if real else 0.0,
            acs=acs / images,
            acs_low=low / images,
        )

    def _driver(self) -> Values:
        """Return the values that drive it: the plainest, of two alike those used less."""
        if not self.other.elements or self.input.kind == self.other.kind == "binary":
            return self.input

        def price(values: Values) -> tuple[int, float]:
            kind = values.kind
            return _ORDER.index(kind), 0.0 if kind == "real" else values.uses

        return min(self.input, self.other, key=price)


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
            tally.input.kind = "real"
        elif computes(func):
            raise cannot_count(str(packet))
        return out

    def _sum(self, x: Tensor, out: Tensor) -> None:
        if out.numel() == x.numel():
            return
        self._next("sum").input.add(x, 1)

    def _convolution(self, args: tuple[Any, ...], out: Tensor) -> None:
        x, weight, _, *geometry, groups = args[:9]
        transposed = geometry[3]
        tally = self._next("conv")
        tally.input.add(x)
        # how many taps meet an input of each place: at the border fewer than in the middle
        plane, kernel, given = (
            torch.ones(1, 1, *each.shape[2:], dtype=torch.float64, device=x.device)
            for each in (x, weight, out)
        )
        wanted = (True, False, False)  # the gradient of the input alone
        taps = aten.convolution_backward(given, plane, kernel, None, *geometry, 1, wanted)[0][0, 0]
        taps = taps * (weight.shape[1] if transposed else weight.shape[0] // groups)
        tally.input.uses += float((torch.count_nonzero(x, dim=(0, 1)) * taps).sum())
        tally.input.spikes += float((x.sum(dim=(0, 1), dtype=torch.float64) * taps).sum())
        macs = prod(weight.shape[1:]) * (x.numel() if transposed else out.numel())
        tally.calls.append((macs, len(x)))  # padding included, as everybody counts them
        self._compare_steps(tally, x)

    def _product(self, a: Tensor, b: Tensor) -> None:
        a = a if a.ndim > 1 else a[None]
        b = b if b.ndim > 1 else b[:, None]
        weights = [t.untyped_storage()._cdata in self._weights for t in (a, b)]
        tally = self._next("linear" if any(weights) else "product")
        tally.calls.append((a.numel() * b.shape[-1], len(a)))
        if weights[0]:
            tally.input.add(b, a.shape[-2])
            tally.same = False  # where its steps lie is unknown
            return
        tally.input.add(a, b.shape[-1])
        self._compare_steps(tally, a)
        if not weights[1]:
            tally.other.add(b, a.shape[-2])
            left, right = a.sum(-2, dtype=torch.float64), b.sum(-1, dtype=torch.float64)
            tally.meetings += float((left * right).sum())  # how often a 1 meets a 1

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
        return tuple(t.path for t in weighted if t.same and t.input.kind == "real")

    def results(self, images: int, steps: int, *, norms: bool) -> tuple[Operation, ...]:
        """Return the operations for one image, in order; `norms` are those of batch norms too."""
        found = []
        for tally in self._tallies.values():
            if tally.what == "norm":
                if not norms:
                    continue
                tally.input.kind = "real"
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


class Values:
    """Counts the values of tensors: the least plain kind, the sum, and how many were 0, 1, 2, ….

    `uses` are the results that values other than 0 go into; in `spikes` a value n counts n times.
    """

    def __init__(self) -> None:
        self.kind: Kind = "binary"
        self.elements = self.nonzero = 0
        self.total = self.uses = self.spikes = 0.0
        self.histogram = torch.zeros(LARGEST + 1, dtype=torch.int64)

    def add(self, x: Tensor, fan_out: int = 0) -> None:
        """Count the values of a tensor, each of which goes into a number of results."""
        nonzero, total = int(torch.count_nonzero(x)), float(x.sum(dtype=torch.float64))
        self.elements += x.numel()
        self.nonzero += nonzero
        self.total += total
        self.uses += nonzero * fan_out
        self.spikes += total * fan_out
        if bool(((x == 0) | (x == 1)).all()):
            self.histogram[0] += x.numel() - nonzero
            self.histogram[1] += nonzero
        elif bool(((x >= 0) & (x == x.round())).all()):
            self.kind = max(self.kind, "counts", key=_ORDER.index)
            cells = x.flatten().clamp(max=LARGEST).long()
            self.histogram += torch.bincount(cells, minlength=LARGEST + 1).cpu()
        else:
            self.kind = "real"

    def reading(self) -> InputValues:
        """Return what was counted as a record has it."""
        shares = None
        if self.kind != "real":
            cells: list[int] = self.histogram.tolist()
            last = max(i for i, cell in enumerate(cells) if cell or i == 1)
            shares = tuple(cell / self.elements for cell in cells[: last + 1])
        mean, nonzero = self.total / self.elements, self.nonzero / self.elements
        return InputValues(kind=self.kind, mean=mean, nonzero=nonzero, shares=shares)
