# SPDX-License-Identifier: Apache-2.0
"""Models on ``meta`` are built without drawing their numbers, of which nothing would remain.

There an initialiser runs operation by operation in Python, which is most of what a model costs.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any


def skip_initialisers() -> None:
    """Let the initialisers of PyTorch and timm leave tensors on ``meta`` as they are."""
    import timm.layers.weight_init
    import torch

    for module in (torch.nn.init, timm.layers.weight_init):
        for name in vars(module).copy():
            if name.startswith("_no_grad_") or name == "_trunc_normal_":
                _skip_on_meta(module, name)


def _skip_on_meta(module: ModuleType, name: str) -> None:
    initialise = getattr(module, name)
    if hasattr(initialise, "__wrapped__"):
        return

    @functools.wraps(initialise)
    def unless_on_meta(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta else initialise(tensor, *args, **kwargs)

    setattr(module, name, unless_on_meta)
