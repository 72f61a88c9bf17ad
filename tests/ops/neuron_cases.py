# SPDX-License-Identifier: Apache-2.0
"""Neurons of every kind, run by a path and by the reference; as a program, Triton's interpreter."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keymix.ops.neuron.multi_step import integrate_and_fire
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.neuron.surrogate import Surrogate
from tolerances import close


@dataclass(frozen=True)
class Case:
    steps: int = 3
    v_reset: float | None = 0.0
    detach_reset: bool = True
    surrogate: str = "sigmoid"
    starts: bool = False
    learned: str = ""  # "", "layer" or "neuron"
    last: bool = False
    shape: tuple[int, ...] = (2, 3, 5)

    @property
    def how(self) -> Dynamics:
        return Dynamics(
            v_threshold=0.6,
            v_reset=self.v_reset,
            detach_reset=self.detach_reset,
            surrogate=Surrogate(self.surrogate),
        )

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Any]:
        """Currents, potential, keep, gain."""
        x = 2 * torch.randn(self.steps, *self.shape, dtype=dtype)
        v = torch.randn(self.shape, dtype=dtype) if self.starts else None
        keep: Any = 0.7
        gain: Any = 0.3
        if self.learned:
            shape = () if self.learned == "layer" else (self.shape[0], *[1] * len(self.shape[1:]))
            keep, gain = torch.rand(shape, dtype=dtype), 0.2 + torch.rand(shape, dtype=dtype)
        return [x, v, keep, gain]


def every_case() -> Iterator[Case]:
    """All combinations of options that meet in one line of the backward pass, few of the rest."""
    for reset, detach, surrogate, last in itertools.product(
        (0.0, -0.3, None), (True, False), ("sigmoid", "atan"), (True, False)
    ):
        yield Case(v_reset=reset, detach_reset=detach, surrogate=surrogate, last=last)
        yield Case(v_reset=reset, detach_reset=detach, learned="layer", last=last, starts=True)
    for reset in (0.0, -0.3, None):
        yield Case(v_reset=reset, learned="neuron", detach_reset=False)
        yield Case(v_reset=reset, steps=1, last=True, starts=True, learned="layer")
        yield Case(v_reset=reset, steps=1)
        yield Case(v_reset=reset, shape=())
        yield Case(v_reset=reset, shape=(), starts=True, last=True)


def outcome(case: Case, inputs: list[Any], backend: str) -> list[Tensor | None]:
    """Spikes, last potential, and the gradients of all inputs that are tensors."""
    leaves = [
        each.detach().requires_grad_() if isinstance(each, Tensor) else each for each in inputs
    ]
    x, v, keep, gain = leaves
    spikes, last = integrate_and_fire(
        x, v, keep=keep, gain=gain, how=case.how, backend=backend, last=case.last
    )
    weigh = torch.Generator().manual_seed(1)
    loss = 0.0
    for out in (spikes, last):
        if out is not None:
            factor = torch.randn(out.shape, generator=weigh, dtype=torch.float64)
            loss = loss + (out * factor.to(out)).sum()
    loss.backward()
    return [spikes, last, *(each.grad for each in leaves if isinstance(each, Tensor))]


def agrees(
    case: Case,
    backend: str,
    view: Callable[[Tensor], Tensor] | None = None,
    device: str = "cpu",
) -> None:
    """Hold a path on a device to the reference on CPU in float64: outputs and every gradient."""
    inputs = case.inputs()
    wanted = outcome(case, inputs, "reference")
    if view is not None:
        inputs[0] = view(inputs[0])
    inputs = [each.to(device) if isinstance(each, Tensor) else each for each in inputs]
    found = [
        None if each is None else each.to(wanted[0].device)
        for each in outcome(case, inputs, backend)
    ]
    assert 0 < wanted[0].mean() < 1 or case.shape == ()
    assert torch.equal(found[0], wanted[0])
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:  # a gradient of nothing may be left out
            assert one is None or other is None
            assert all(each is None or not each.any() for each in (one, other))
        else:
            close(one, other)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    for case in every_case():
        torch.manual_seed(0)
        agrees(case, "triton")
    agrees(Case(), "triton", lambda x: x.transpose(1, 3).contiguous().transpose(1, 3))
    agrees(Case(shape=(700,)), "triton")  # more neurons than a block has
