# SPDX-License-Identifier: Apache-2.0
"""The attention that is measured alone is that of the forward pass."""

from __future__ import annotations

import pytest
import torch

from keymix.analysis.mixer_alone import attention_operation
from keymix.errors import UserError
from keymix.mixers.registry import create_mixer
from keymix.mixers.spec import parse_mixer
from tolerances import close

SPIKING = ["spiking_self", "spike_driven", "qk_token"]


@pytest.mark.parametrize("label", ["softmax", "static_key(key_grid=1/4)", *SPIKING])
def test_the_operation_is_that_of_the_forward_pass(label: str) -> None:
    spec = parse_mixer(label)
    options = dict(spec.options[0])
    mixer = create_mixer(spec.names[0], dim=12, num_heads=3, grid=(3, 5), **options).double().eval()
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
    parts = {role: parts[role] for role in mixer.roles}
    assert {r: tuple(p.shape) for r, p in parts.items()} == operation.shapes
    gathered = operation.run(parts)
    close(gathered.flatten(-2) if spiking else gathered.transpose(-3, -2).flatten(-2), seen[0])


def test_mixers_without_queries_have_no_such_operation() -> None:
    with pytest.raises(UserError, match="'pooling' has no attention of its own"):
        attention_operation(create_mixer("pooling", dim=8, grid=(2, 2)), 4)
