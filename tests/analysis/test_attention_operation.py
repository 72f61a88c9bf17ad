# SPDX-License-Identifier: Apache-2.0
"""The attention that is measured alone is that of the forward pass."""

from __future__ import annotations

import pytest
import torch

from keymix.analysis.attention_operation import attention_operation
from keymix.errors import UserError
from keymix.mixers.registry import create_mixer
from tolerances import close


@pytest.mark.parametrize("name", ["softmax", "spiking_self", "spike_driven", "qk_token"])
def test_the_operation_is_that_of_the_forward_pass(name: str) -> None:
    mixer = create_mixer(name, dim=12, num_heads=3, grid=(3, 5)).double().eval()
    operation = attention_operation(mixer, 15)
    spiking = mixer.claims.domain == "spiking"
    x = torch.rand((1, 1, 15, 12) if spiking else (1, 15, 12), dtype=torch.float64)
    seen: list[torch.Tensor] = []
    mixer.proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    if spiking:
        for role in mixer.roles:
            torch.nn.init.constant_(getattr(mixer, f"{role}_bn").bias, 1.9)
        parts = {r: mixer.spikes(x)[r.upper()].unflatten(-1, (3, 4)) for r in mixer.roles}
        seen.clear()
    else:
        parts = mixer.inputs(x, (3, 5))
    mixer(x)
    assert {r: tuple(p.shape) for r, p in parts.items()} == operation.shapes
    gathered = operation.run(parts)
    close(gathered.flatten(-2) if spiking else gathered.transpose(-3, -2).flatten(-2), seen[0])


def test_mixers_without_queries_have_no_such_operation() -> None:
    with pytest.raises(UserError, match="'pooling' has no attention of its own"):
        attention_operation(create_mixer("pooling", dim=8, grid=(2, 2)), 4)
