# SPDX-License-Identifier: Apache-2.0
"""Integrate-and-fire over T steps by the path that serves, and why it is that one."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from keymix.errors import UserError, unknown
from keymix.ops.neuron import blocked, reference
from keymix.ops.neuron.layout import Dynamics, forward_mode

Backend = Literal["auto", "reference", "blocked", "inductor", "triton"]
BACKENDS = ("auto", "reference", "blocked", "inductor", "triton")


@dataclass(frozen=True)
class Choice:
    """Which path runs and why.

    Attributes:
        name: ``"reference"``, ``"blocked"``, ``"inductor"`` or ``"triton"``.
        why: The reason in words.
    """

    name: str
    why: str


def _no_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"its kernels are for CUDA, not {device.type!r}"
    if not _finds_c_compiler():
        return (
            "Triton finds no C compiler, with which it builds what launches a kernel; install one "
            "(gcc) or name it in the variable CC"
        )
    return None


@functools.cache
def _finds_c_compiler() -> bool:
    """Whether Triton would find one; asked once, as neurons choose their path in every call."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _no_compiler(device: torch.device) -> str | None:
    from keymix.ops.neuron.inductor import cannot_run

    return cannot_run(device)


def _traced(x: Tensor | None) -> str | None:
    """Why a tensor is followed by something that needs to see every operation; None if not."""
    if torch.compiler.is_compiling():
        return "the compiler around it fuses the steps"
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return "a tracer or transform around it follows every operation"
    if forward_mode():
        return "derivatives are carried along in the forward pass"
    if x is not None and (x.is_meta or type(x) not in (Tensor, torch.nn.Parameter)):
        return "the currents hold no numbers, or are a tensor of another class"
    return None


def choose(asked: str, x: Tensor | None = None, device: torch.device | None = None) -> Choice:
    """Choose the path.

    ``auto`` never compiles anything by itself, which takes seconds, so that what a run computes
    does not hang on what ran before it.

    Args:
        asked: ``"auto"``, or a path by name.
        x: The currents; None if they are not known yet.
        device: Where it will run if ``x`` is None; the CPU by default.

    Raises:
        UserError: If a path was asked for by name that cannot run; with the reason.
    """
    if asked not in BACKENDS:
        raise unknown("backend", str(asked), BACKENDS)
    where = x.device if x is not None else device or torch.device("cpu")
    traced = _traced(x)
    if asked == "reference":
        return Choice("reference", "asked for by name")
    if traced is not None:  # whatever was named: the function is the same
        return Choice("reference", traced)
    if asked == "auto":
        if where.type == "cpu":
            return Choice("blocked", "on CPU, a chunk of neurons stays in cache for all steps")
        against = _no_triton(where)
        if against is None:
            return Choice("triton", "on CUDA, one kernel takes all steps")
        return Choice("reference", against)
    against = {"blocked": lambda _: None, "inductor": _no_compiler, "triton": _no_triton}[asked](
        where
    )
    if against is not None:
        raise UserError(f"backend={asked!r} cannot run here: {against}")
    return Choice(asked, "asked for by name")


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
    """Run neurons over T steps: what :mod:`keymix.ops.neuron.reference` computes.

    Args:
        x: Input currents ``[T, ...]``.
        v: Potential before the first step; at rest if None.
        keep: Share of the potential above rest that a step keeps; a tensor gets a gradient.
        gain: Weight of the input; a tensor gets a gradient.
        how: Threshold, reset and surrogate.
        backend: ``"auto"``, or a path by name, which runs or raises with the reason.
        last: Whether the potential after the last step is wanted.

    Returns:
        Spikes in x's dtype and memory format (steps outermost), and the last potential in float32
        or better, or None.

    Raises:
        UserError: If x has no steps or no floating-point numbers, if v, keep or gain do not fit a
            step, or if the backend cannot run.
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
    path = choose(backend, x).name
    if path == "blocked":
        return blocked.integrate_and_fire(x, v, keep, gain, how, last)
    if path == "inductor":
        from keymix.ops.neuron import inductor

        return inductor.integrate_and_fire(x, v, keep, gain, how, last)
    if path == "triton":
        from keymix.ops.neuron import triton

        return triton.integrate_and_fire(x, v, keep, gain, how, last)
    spikes, final = reference.integrate_and_fire(
        x,
        v,
        keep=keep,
        gain=gain,
        v_threshold=how.v_threshold,
        v_reset=how.v_reset,
        detach_reset=how.detach_reset,
        surrogate=how.surrogate,
    )
    return spikes, final if last else None


def gradients(
    x: Tensor,
    grads: Tensor,
    *,
    keep: float | Tensor,
    gain: float | Tensor,
    how: Dynamics,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the currents, and of keep and gain where these are tensors.

    They are those of :func:`integrate_and_fire` from rest. Paths that need not run for the spikes
    do not.

    Args:
        x: Input currents ``[T, ...]``.
        grads: Gradients of the spikes.
        keep: As there.
        gain: As there.
        how: As there.
        backend: As there.
    """
    x = x.detach()
    path = choose(backend, x).name
    if path == "blocked":
        return blocked.gradients(x, grads, keep, gain, how)
    if path == "triton":
        from keymix.ops.neuron import triton

        return triton.gradients(x, grads, keep, gain, how)
    with torch.enable_grad():
        x = x.requires_grad_()
        keep, gain = (
            each.detach().requires_grad_() if isinstance(each, Tensor) else each
            for each in (keep, gain)
        )
        spikes, _ = integrate_and_fire(
            x, keep=keep, gain=gain, how=how, backend=backend, last=False
        )
        learned = [each for each in (keep, gain) if isinstance(each, Tensor)]
        grad_x, *others = torch.autograd.grad(spikes, [x, *learned], grads)
    found = iter(others)
    grad_keep, grad_gain = (
        next(found) if isinstance(each, Tensor) else None for each in (keep, gain)
    )
    return grad_x, grad_keep, grad_gain
