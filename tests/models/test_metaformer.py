# SPDX-License-Identifier: Apache-2.0
"""CAFormer with other mixers: placements, image sizes, features, weights at a seed, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers.registry import list_mixers
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close

SMALL: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32), "head_dim": 8}


def small(name: str = "skaformer_s18", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = create_model(name, **{"img_size": 64, "num_classes": 5, **SMALL, **options})
    model = model.double().eval()
    stir(model)
    return model


def images(height: int = 64, width: int = 64) -> Tensor:
    noise = torch.Generator().manual_seed(4)
    return torch.randn(2, 3, height, width, generator=noise, dtype=torch.float64)


def names_of(model: nn.Module) -> list[str]:
    return [mixer.mixer_name for mixer in find_mixers(model).values()]


def test_the_names_place_static_keys_in_the_second_stage() -> None:
    rest = ["softmax"] * 3
    assert names_of(small()) == ["sep_conv", "static_key", *rest]
    assert names_of(small("cskaformer_s18")) == ["sep_conv", "conv_static_key", *rest]
    micro = create_model("caformer_micro_32")
    assert names_of(micro) == ["sep_conv", "sep_conv", *rest]
    grids = [mixer.site.grid for mixer in find_mixers(micro).values()]
    assert grids == [(16, 16), (8, 8), (4, 4), (4, 4), (2, 2)]


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_every_mixer_serves_throughout(mixer: str) -> None:
    model = small(mixer=mixer, img_size=(64, 96)).train()
    assert names_of(model) == [mixer] * 5
    y = model(images(64, 96))
    assert y.shape == (2, 5)
    y.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_one_mixer_a_block() -> None:
    wanted = ["sep_conv", "static_key", "softmax", "pooling", "key_value"]
    assert names_of(small(mixer=wanted)) == wanted


@pytest.mark.parametrize("mixer", [["sep_conv", "sep_conv", "softmax", "softmax"], "kv"])
def test_images_of_any_size_go_in_where_nothing_is_learned_a_position(mixer: Any) -> None:
    model, x = small(mixer=mixer), images(96, 64)
    y = model(x)
    model.set_input_size((96, 64))
    assert model.img_size == (96, 64)
    assert find_mixers(model)["stages.3.blocks.0.token_mixer.mixer"].site.grid == (3, 2)
    close(model(x), y)


@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key", "random"])
def test_learned_positions_refuse_and_leave_the_model_as_it_was(mixer: str) -> None:
    model = small(mixer=["sep_conv", mixer, "softmax", "softmax"])
    before = model(images())
    with pytest.raises(UserError, match=rf"stages\.1.*{mixer}"):
        model.set_input_size(96)
    with pytest.raises(UserError, match=r"\(8, 8\)|64 tokens"):
        model(images(96, 96))
    assert model.img_size == (64, 64)
    assert torch.equal(model(images()), before)


@pytest.mark.parametrize("policy", ["interpolate", "pool_values"])
@pytest.mark.parametrize("name", ["skaformer_s18", "cskaformer_s18"])
def test_with_a_policy_static_keys_take_images_of_any_size(name: str, policy: str) -> None:
    mixer = find_mixers(small(name))["stages.1.blocks.0.token_mixer.mixer"].mixer_name
    model = small(name, mixer_options={mixer: {"resize": policy}})
    assert torch.equal(model(images()), small(name)(images()))
    y = model(images(96, 64))
    model.set_input_size((96, 64))
    close(model(images(96, 64)), y)


def test_the_backbone_is_the_same_at_a_seed_whatever_the_mixer() -> None:
    states = []
    for mixer in list_mixers(domain="dense"):
        torch.manual_seed(5)
        state = create_model("skaformer_s18", mixer=mixer, img_size=64, **SMALL).state_dict()
        states.append({k: v.flatten() for k, v in state.items() if ".token_mixer." not in k})
    for state in states[1:]:  # images in one, tokens in the other: the same numbers
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[k], v) for k, v in states[0].items())


def test_features_for_detection() -> None:
    options = {**SMALL, "dims": (8, 16, 16, 32)}
    model = timm.create_model("cskaformer_s18", features_only=True, img_size=64, **options)
    # stages of one width have no downsampling between them
    assert model.feature_info.reduction() == [4, 8, 8, 16]
    found = model(images().float())
    assert [tuple(f.shape[1:]) for f in found] == [(8, 16, 16), (16, 8, 8), (16, 8, 8), (32, 4, 4)]
    micro = timm.create_model("caformer_micro_32", features_only=True, out_indices=(1, 3))
    assert micro.feature_info.reduction() == [4, 16]
    early = small().forward_intermediates(images(), indices=[0], stop_early=True)
    assert early[0].shape == early[1][0].shape == (2, 8, 16, 16)


def test_rates_reach_where_they_belong() -> None:
    model = small(drop_path_rate=0.4, proj_drop_rate=0.1, attn_drop_rate=0.2, mixer="softmax")
    blocks = [block for stage in model.stages for block in stage.blocks]
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    for block in blocks:
        made = block.token_mixer.mixer
        assert (made.attn_drop_p, made.proj_drop.p, block.mlp.drop1.p) == (0.2, 0.1, 0.1)


def test_what_is_read_out_is_known() -> None:
    model = small()
    assert model.global_pool == "avg"
    model.reset_classifier(7, "max")
    assert model.global_pool == "max"
    features = model.forward_features(images())
    pooled = model.head.norm(features.amax((2, 3), keepdim=True)).flatten(1)
    close(model.forward_head(features, pre_logits=True), pooled)
