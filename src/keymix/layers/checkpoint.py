# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that leaves running statistics as they are without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def still_statistics(module: nn.Module) -> Iterator[None]:
    """Keep the running statistics of all BatchNorms in a module from moving for a while."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    kept = [(m, m.momentum, m.num_batches_tracked) for m in norms]
    try:
        for m in norms:
            m.momentum = 0.0
            if m.num_batches_tracked is not None:
                m.num_batches_tracked = m.num_batches_tracked.clone()
        yield
    finally:
        for m, momentum, counted in kept:
            m.momentum, m.num_batches_tracked = momentum, counted


def recomputing() -> bool:
    """Whether this forward pass runs within a backward pass, as a checkpoint's second one does.

    For modules inside models of other libraries, whose checkpointing is not ours to change.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)


def checkpointed(module: nn.Module, *args: Any, when: bool = True) -> Any:
    """Call a module; recompute its activations in the backward pass instead of keeping them.

    It is called as it is where ``when`` is false or no gradients are recorded. The second pass sees
    the same batch again; a BatchNorm would take it into its running statistics twice, so there they
    stay as they are.
    """
    if not when or not torch.is_grad_enabled():
        return module(*args)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), still_statistics(module)

    return torch.utils.checkpoint.checkpoint(
        module, *args, use_reentrant=False, context_fn=contexts
    )
