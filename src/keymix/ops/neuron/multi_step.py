# SPDX-License-Identifier: Apache-2.0
"""Integrate-and-fire over T steps by the path that serves, and why it is that one."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from keymix.errors import UserError, unknown
from keymix.ops.neuron import autograd, blocked, reference
from keymix.ops.neuron.autograd import Kernel
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.tracing import traced

Backend = Literal["auto", "reference", "blocked", "triton"]
BACKENDS = get_args(Backend)


def check_backend(name: str) -> None:
    """Refuse the name of a backend that does not exist; list those that do."""
    if name not in BACKENDS:
        raise unknown("backend", str(name), BACKENDS)


@dataclass(frozen=True)
class Choice:
    """Which path runs and why.

    Attributes:
        name: ``"reference"``, ``"blocked"`` or ``"triton"``.
        why: The reason in words.
    """

    name: str
    why: str


def choose(asked: str, x: Tensor | None = None, device: torch.device | None = None) -> Choice:
    """Choose the path, ``"auto"`` or one by name, for the currents x, or a device if x is None.

    Refuses a path that was asked for by name and cannot run; the reason is in the error.
    """
    check_backend(asked)
    where = x.device if x is not None else device or torch.device("cpu")
    if asked == "reference":
        return Choice("reference", "asked for by name")
    followed = traced(x)
    if followed is not None:  # whatever was named: the function is the same
        return Choice("reference", followed)
    if asked == "auto" and where.type == "cpu":
        return Choice("blocked", "on CPU, a chunk of neurons stays in cache for all steps")
    against = None if asked == "blocked" else _no_triton(where)
    if asked == "auto":
        if against is not None:
            return Choice("reference", against)
        return Choice("triton", "on CUDA, one kernel takes all steps")
    if against is not None:
        raise UserError(f"backend={asked!r} cannot run here: {against}")
    return Choice(asked, "asked for by name")


def _no_triton(device: torch.device) -> str | None:
    """Why the Triton kernel cannot run on a device; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"its kernel is for CUDA, not {device.type!r}"
    if not finds_c_compiler():
        return (
            "Triton finds no C compiler, with which it builds what launches a kernel; install one "
            "(gcc) or name it in the variable CC"
        )
    return None


@functools.cache
def finds_c_compiler() -> bool:
    """Whether Triton would find one; asked once, as a path is chosen in every call."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _kernel(backend: str, x: Tensor) -> Kernel | None:
    """The kernel of the path that runs; None for the reference."""
    path = choose(backend, x).name
    if path == "triton":
        from keymix.ops.neuron import triton

        return triton
    return blocked if path == "blocked" else None


def _fits(value: float | Tensor | None, shape: torch.Size) -> bool:
    if not isinstance(value, Tensor):
        return True
    if value.ndim > len(shape):
        return value.numel() == 1
    ends = zip(value.shape[::-1], shape[::-1], strict=False)
    return all(own in (1, size) for own, size in ends)


def integrate_and_fire(
    x: Tensor,
    v: Tensor | None = None,
    *,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    backend: str = "auto",
    last: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Run neurons over T steps: what :mod:`keymix.ops.neuron.reference` computes, by a backend.

    Spikes have x's dtype and memory format (steps outermost); the potential after the last step,
    if wanted, is in float32 or better. Refuses currents without steps or of whole numbers, v, keep
    or gain that do not fit a step, and a backend that cannot run.
    """
    if x.ndim < 1 or x.shape[0] < 1 or not x.is_floating_point():
        raise UserError(
            f"currents {tuple(x.shape)} of {x.dtype}: neurons take floating-point numbers [T, ...] "
            "with at least one step"
        )
    for name, value in (("v", v), ("keep", keep), ("gain", gain)):
        if not _fits(value, x.shape[1:]):
            assert isinstance(value, Tensor)
            raise UserError(
                f"{name} {tuple(value.shape)} does not fit a step of the currents, "
                f"{tuple(x.shape[1:])}"
            )
    kernel = _kernel(backend, x)
    if kernel is not None:
        return autograd.run_kernel(kernel, x, v, keep, gain, how, last)
    spikes, final = reference.integrate_and_fire(x, v, keep=keep, gain=gain, how=how)
    return spikes, final if last else None
