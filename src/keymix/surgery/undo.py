# SPDX-License-Identifier: Apache-2.0
"""All or nothing: a model's modules and the random states, put back after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def undone_on_failure(model: nn.Module) -> Iterator[None]:
    """Put a model's modules, and what was drawn from the random states, back if the body fails.

    Which modules, parameters, buffers and hooks are where is remembered, not their values: the body
    must not write into tensors that the model has already.

    Args:
        model: What the body may take apart; of its devices are the random states, and the CPU's.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    drawn = torch.get_rng_state()
    drawn_there = {device: torch.cuda.get_rng_state(device) for device in devices}
    held = [(module, type(module), _held(module)) for module in model.modules()]
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            for module, kind, was in held:
                _restore(module, kind, was)
            torch.set_rng_state(drawn)
            for device, state in drawn_there.items():
                torch.cuda.set_rng_state(state, device)


_Held = dict[str, tuple[Any, dict[Any, Any] | None]]


def _held(module: nn.Module) -> _Held:
    """Return a module's attributes; of a dictionary, such as its children's, what is in it too."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }


def _restore(module: nn.Module, kind: type[nn.Module], was: _Held) -> None:
    if type(module) is not kind:
        module.__class__ = kind
    vars(module).clear()
    for name, (value, content) in was.items():
        if content is not None:
            value.clear()
            value.update(content)
        vars(module)[name] = value
