# SPDX-License-Identifier: Apache-2.0
"""What a swap keeps of the attention before: dropouts, and whether weights train."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny

from keymix.hosts import find_mixers
from keymix.swap import swap


def test_dropouts_of_the_mixer_before_are_those_of_the_next() -> None:
    model = tiny("timm_vit")  # whose own attention drops nothing
    swap(model, "softmax", mixer_options={"attn_drop": 0.2, "proj_drop": 0.3})
    swap(model, "static_key")
    for mixer in find_mixers(model).values():
        assert (mixer.attn_drop.p, mixer.proj_drop.p) == (0.2, 0.3)


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_joint_projection_trains_if_one_of_its_roles_did(role: str) -> None:
    model: Any = tiny("timm_eva02").requires_grad_(False)  # it holds q, k and v apart
    model.blocks[0].attn.get_submodule(f"{role}_proj").requires_grad_(True)
    swap(model, "softmax")
    first, second = (mixer.qkv.weight.requires_grad for mixer in find_mixers(model).values())
    assert (first, second) == (True, False)
