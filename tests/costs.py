# SPDX-License-Identifier: Apache-2.0
"""What models cost, for tests of published figures: counted on ``meta``, each model once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keymix.analysis.counting import default_input_size, run_counting
from keymix.models import create_model
from keymix.models.match import trainable

_COUNTED: dict[str, Cost] = {}


@dataclass(frozen=True)
class Cost:
    """Trainable parameters and multiply-adds, as ``keymix.count`` finds them."""

    params: int
    macs: int

    @property
    def flops(self) -> int:
        return 2 * self.macs


def on_meta(name: str, **options: Any) -> nn.Module:
    """The model without memory or numbers."""
    with torch.device("meta"):
        return create_model(name, **options)


def params(name: str, **options: Any) -> int:
    """Trainable parameters of a model."""
    return trainable(on_meta(name, **options))


def cost(name: str, size: Sequence[int] | None = None, **options: Any) -> Cost:
    """The cost of a model on an input of this size, by default its own."""
    key = repr((name, size, sorted(options.items())))
    if key not in _COUNTED:
        _COUNTED[key] = cost_of(on_meta(name, **options), size)
    return _COUNTED[key]


def cost_of(model: nn.Module, size: Sequence[int] | None = None) -> Cost:
    """The cost of a model on ``meta``, which is of no use afterwards."""
    shape = default_input_size(model) if size is None else size
    with torch.device("meta"):
        macs = run_counting(model.eval(), torch.zeros(1, *shape))
    return Cost(trainable(model), sum(macs.by_path.values()))
