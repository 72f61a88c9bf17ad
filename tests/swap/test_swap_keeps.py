# SPDX-License-Identifier: Apache-2.0
"""What a swap keeps of the attention before: dropouts, and whether weights train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import images, tiny

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


def test_what_is_made_in_inference_mode_trains_and_the_report_names_what_the_swap_left() -> None:
    model: Any = tiny("timm_vit")
    for module in (model.blocks[0].attn.qkv, model.blocks[1].attn, model.norm):
        module.register_forward_pre_hook(lambda *_: None)
    old = [id(p) for p in model.parameters()]
    with torch.inference_mode():
        x = images((8, 12))
        report = swap(model, "static_key", calibration=x)
    model.train()(x.clone()).square().sum().backward()
    new = [p for p in model.parameters() if id(p) not in old]
    assert all(p.grad is not None for p in model.parameters())
    assert report.new_tensors == len(new) == 14
    assert f"does not train the {len(new)} new parameter tensors" in report.answer
    assert report.silent_hooks == ("blocks.0.attn.qkv", "blocks.1.attn")
    assert "replaced: blocks.0.attn.qkv, blocks.1.attn" in report.answer
