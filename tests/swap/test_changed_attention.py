# SPDX-License-Identifier: Apache-2.0
"""Attention that somebody changed in place is refused: what it computes is not its class's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn
from torch.nn.utils import parametrize

from each import together
from keymix.errors import UserError
from keymix.hosts.layers import find_layers

OWN = ("timm_vit", "timm_cait", "timm_swin", "timm_eva02", "torchvision_vit", "torchvision_swin")


class LowRank(nn.Linear):
    """A linear map and something besides."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def like(linear: nn.Linear) -> nn.Linear:
    return LowRank(linear.in_features, linear.out_features).to(linear.weight)


def weights_of_last(model: nn.Module) -> dict[str, Tensor]:
    layer = find_layers(model)[-1]
    return layer.host.weights(layer.module)


@together
@pytest.mark.parametrize("name", [*OWN, "hugging_face_vit", "timm_metaformer"])
def test_a_forward_replaced_on_the_module_is_refused(name: str) -> None:
    model = tiny(name)
    attention: Any = find_layers(model)[-1].module
    attention.forward = lambda x, *args, **kwargs: torch.zeros_like(x)
    with pytest.raises(UserError, match="replaced"):
        weights_of_last(model)


@together
@pytest.mark.parametrize("part", ["qkv", "proj"])
@pytest.mark.parametrize("name", ["timm_vit", "timm_cait", "timm_swin", "torchvision_swin"])
def test_weights_of_more_than_a_plain_linear_are_not_copied(name: str, part: str) -> None:
    layer = find_layers(tiny(name))[0]
    setattr(layer.module, part, like(getattr(layer.module, part)))
    with pytest.raises(UserError, match=f"{part} of .* is LowRank, not a plain Linear"):
        layer.host.weights(layer.module)


@pytest.mark.parametrize("name", ["timm_vit", "torchvision_swin"])
def test_weights_of_a_parametrized_linear_are_those_it_computes_with(name: str) -> None:
    layer = find_layers(tiny(name))[0]
    before = layer.host.weights(layer.module)
    parametrize.register_parametrization(layer.module.get_submodule("qkv"), "weight", Doubled())
    after = layer.host.weights(layer.module)
    assert after.keys() == before.keys()
    torch.testing.assert_close(after["k.weight"], 2 * before["k.weight"])
