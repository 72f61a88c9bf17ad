# SPDX-License-Identifier: Apache-2.0
"""What follows a computation: compilers, tracers, transforms, derivatives in the forward pass.

Paths with a backward pass written by hand leave the word to the plain formula there.
"""

from __future__ import annotations

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


def traced(x: Tensor | None = None) -> str | None:
    """Why operations, or those on a tensor, are followed one by one; None if they are not."""
    if torch.compiler.is_compiling():
        return "the compiler around it fuses the steps"
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return "a tracer or transform around it follows every operation"
    if forward_mode():
        return "derivatives are carried along in the forward pass"
    if x is not None and (x.is_meta or type(x) not in (Tensor, torch.nn.Parameter)):
        return "the currents hold no numbers, or are a tensor of another class"
    return None
