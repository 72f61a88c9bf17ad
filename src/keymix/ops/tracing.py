# SPDX-License-Identifier: Apache-2.0
"""What follows a computation: compilers, tracers, transforms, derivatives in the forward pass.

Paths with a backward pass written by hand leave the word to the plain formula there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def forward_mode() -> bool:
    """Whether derivatives are carried along in the forward pass."""
    return forward_ad._current_level >= 0


def batched(*grads: Tensor | None) -> bool:
    """Whether one of the gradients is many, as ``is_grads_batched`` and ``vmap`` pass them."""
    look = torch._C._functorch
    return any(
        each is not None and (look.is_batchedtensor(each) or look.is_legacy_batchedtensor(each))
        for each in grads
    )


def gradients_of(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of a plain formula, which can be differentiated again.

    ``grads`` are those of its outputs, None for zero; ``needs`` says of which inputs they are
    wanted.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, so that what one input depends on another by stays out of their gradients
        given = [t if t is None else t.view_as(t) for t in inputs]
        pairs = [
            (y, g)
            for y, g in zip(function(*given), grads, strict=True)
            if y is not None and g is not None
        ]
        wanted = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
        outputs, given_back = [y for y, _ in pairs], [g for _, g in pairs]
        found = iter(
            torch.autograd.grad(outputs, wanted, given_back, create_graph=again, allow_unused=True)
        )
    return [next(found) if need else None for need in needs]


def traced(x: Tensor | None = None) -> str | None:
    """Why operations, or those on a tensor, are followed one by one; None if they are not."""
    if torch.compiler.is_compiling():
        return "the compiler around it fuses the steps"
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return "a tracer or transform around it follows every operation"
    if forward_mode():
        return "derivatives are carried along in the forward pass"
    if x is not None and (x.is_meta or type(x) not in (Tensor, torch.nn.Parameter)):
        return "the input holds no numbers, or is a tensor of another class"
    return None
