# SPDX-License-Identifier: Apache-2.0
"""Models inside of others, compiled in parts, of unknown prefix, and batches with labels."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

import keymix
from each import together
from keymix.analysis.capture import select_layers
from keymix.analysis.rollout import attention_rollout
from keymix.errors import UserError
from keymix.hosts.layers import find_layers
from keymix.swap.plans import choose


def vit(**options: Any) -> nn.Module:
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **options}).double().eval()


def images(number: int = 3) -> Tensor:
    return torch.randn(number, 3, 16, 16, dtype=torch.float64)


def test_registers_of_a_model_inside_another_are_no_class_token() -> None:
    inner = vit(class_token=False, reg_tokens=4, global_pool="avg")
    model = nn.Sequential(nn.Identity(), inner)
    with pytest.raises(UserError, match="no class token passes"):
        keymix.attention_maps(model, images(), queries="cls")
    assert attention_rollout(model, images()).query == "mean"


@together
@pytest.mark.parametrize(
    ("layers", "wanted"),
    [("0,2", [0, 2]), ("blocks.1", [1]), ("-1", [2]), (["-2", "0"], [0, 1]), ("-3--2", None)],
)
def test_maps_and_swaps_choose_layers_alike(layers: Any, wanted: list[int] | None) -> None:
    model = vit(depth=3)
    found = find_layers(model)
    if wanted is None:
        with pytest.raises(UserError, match="unknown layer '-3--2'"):
            choose(found, layers)
        return
    assert choose(found, layers) == [found[i] for i in wanted]
    assert list(select_layers(model, layers)) == [found[i].path for i in wanted]


def test_batches_may_bring_labels() -> None:
    model, x = vit(), images(4)
    alone = keymix.collapse(model, [x[:2], x[2:]]).to_dict()
    labels = torch.zeros(2)
    assert keymix.collapse(model, [(x[:2], labels), [x[2:], labels]]).to_dict() == alone
    with pytest.raises(UserError, match=r"Tensor of shape \(2,\)"):
        keymix.collapse(model, [(labels[:2], x)])


def test_a_prefix_is_counted_where_no_grid_is_known() -> None:
    options = {"embed_dim": 24, "depth": 2, "num_heads": 3}
    model = timm.create_model("naflexvit_base_patch16_gap", **options).eval()
    assert model.num_prefix_tokens == 4
    assert {layer.place.site.num_prefix_tokens for layer in find_layers(model)} == {4}
    (first, _) = keymix.collapse(model, torch.randn(1, 3, 32, 32)).layers
    assert first.sink_in_prefix is not None


def test_of_a_prefix_that_nobody_knows_no_share_is_reported() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 8, 8), nn.Flatten(2), Turned(), Attention(12, 3))
    (layer,) = keymix.collapse(model.double(), images()).layers
    assert layer.sink is not None
    assert layer.sink_in_prefix is None


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


@pytest.mark.slow
def test_blocks_compiled_one_by_one_are_read() -> None:
    model: Any = vit()
    x = images()
    wanted = keymix.attention_maps(model, x)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    found = keymix.attention_maps(model, x)
    for path, each in wanted.items():
        torch.testing.assert_close(found[path], each)
