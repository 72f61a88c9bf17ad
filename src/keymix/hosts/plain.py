# SPDX-License-Identifier: Apache-2.0
"""Whether a module still computes what its class does, so that its weights are all of it."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

UNKNOWN = "what it computes is not known; put the class's own back (del module.forward)"


def patched(module: nn.Module) -> bool:
    """Whether the forward of this one module was replaced."""
    return "forward" in vars(module)


def is_plain_linear(module: object) -> bool:
    """Whether a module is ``nn.Linear`` itself; parametrized weights are weights.

    A subclass may add something in its forward, as adapters of low rank do.
    """
    if not isinstance(module, nn.Linear) or patched(module):
        return False
    return parametrize.type_before_parametrizations(module) is nn.Linear
