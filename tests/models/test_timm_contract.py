# SPDX-License-Identifier: Apache-2.0
"""Every registered model is a timm model: what timm's tools ask of one, it answers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from keymix.hosts import find_mixers
from keymix.mixers.registry import list_mixers
from keymix.models import create_model, list_models
from mixer_cases import gradients, stir
from tolerances import close, differs

every_model = pytest.mark.parametrize("name", list_models())
SHRUNK: dict[str, Any] = {"embed_dim": 16, "depth": 4, "num_heads": 2}


def shrunk(name: str, **options: Any) -> nn.Module:
    """The model as named, but narrow."""
    if name.endswith("_wide"):
        options = {"mixer_options": {"num_heads": 3, "head_dim": 8}, **options}
    return create_model(name, **{**SHRUNK, **options})


def images(model: Any, count: int = 2, seed: int = 1) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    shape = (count, *model.default_cfg["input_size"])
    return torch.randn(shape, generator=noise)


def test_the_papers_and_the_small_models_are_there() -> None:
    assert {"vit_small_p4_32", "ska_vit_small_p4_32", "vit_nano_p2_12"} <= set(list_models())
    assert list_models("*cska*") == ["cska_vit_small_p4_32", "cska_vit_small_spt_p4_32"]


@every_model
def test_timm_makes_it_by_name(name: str) -> None:
    assert timm.is_model(name)
    model = timm.create_model(name, num_classes=7, **({} if "wide" in name else SHRUNK))
    assert model(images(model)).shape == (2, 7)
    assert type(model) is type(shrunk(name))


@every_model
def test_the_configuration_describes_the_model(name: str) -> None:
    model = shrunk(name)
    cfg = model.pretrained_cfg
    assert cfg["architecture"] == name
    assert cfg["num_classes"] == 10
    assert (
        cfg["input_size"] == (model.patch_embed.proj.in_channels, *model.patch_embed.img_size)
        if (isinstance(model.patch_embed.proj, nn.Conv2d))
        else cfg["input_size"][1:] == tuple(model.patch_embed.img_size)
    )
    for role in ("first_conv", "classifier"):
        assert isinstance(model.get_submodule(cfg[role]), nn.Module)
    assert model(images(model)).shape == (2, 10)


@every_model
def test_features_then_head_is_forward(name: str) -> None:
    model = shrunk(name).eval()
    x = images(model)
    features = model.forward_features(x)
    prefix = model.num_prefix_tokens
    area = model.patch_embed.grid_size[0] * model.patch_embed.grid_size[1]
    assert features.shape == (2, prefix + area, 16)
    close(model.forward_head(features), model(x))
    assert model.forward_head(features, pre_logits=True).shape == (2, 16)


@every_model
def test_intermediate_features_lie_on_the_grid(name: str) -> None:
    model = shrunk(name).eval()
    x = images(model)
    final, between = model.forward_intermediates(x, indices=[0, 3])
    assert [tuple(f.shape) for f in between] == [(2, 16, *model.patch_embed.grid_size)] * 2
    close(final, model.forward_features(x))
    assert differs(between[0], between[1])


@every_model
def test_features_only_gives_maps(name: str) -> None:
    model = timm.create_model(
        name, features_only=True, out_indices=(1, 3), **({} if "wide" in name else SHRUNK)
    )
    x = images(shrunk(name))
    found = model(x)
    assert len(found) == len(model.feature_info.channels()) == 2
    reductions = model.feature_info.reduction()
    for feature, channels, reduction in zip(
        found, model.feature_info.channels(), reductions, strict=True
    ):
        assert feature.shape == (2, channels, x.shape[2] // reduction, x.shape[3] // reduction)


@every_model
def test_the_classifier_can_be_reset(name: str) -> None:
    model = shrunk(name)
    assert model.get_classifier() is model.head
    model.reset_classifier(3)
    assert model(images(model)).shape == (2, 3)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert model(images(model)).shape == (2, 16)
    assert shrunk(name, num_classes=0)(images(model)).shape == (2, 16)


@every_model
def test_layers_are_grouped_by_block(name: str) -> None:
    model = shrunk(name)
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(p for ps in groups.values() for p in ps) == sorted(
        p for p, _ in model.named_parameters()
    )
    for path in find_mixers(model):
        number = int(path.split(".")[1])
        found = {g for g, ps in groups.items() for p in ps if p.startswith(f"{path}.")}
        assert found == {number + 1}


@every_model
def test_positions_and_scalars_do_not_decay(name: str) -> None:
    model = shrunk(name)
    names = model.no_weight_decay()
    assert "pos_embed" in names
    free, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=names)
    free_ids = {id(p) for p in free["params"]}
    for key, p in model.named_parameters():
        neutral = p.ndim <= 1 or key in names
        assert (id(p) in free_ids) == neutral, key
    assert decayed["weight_decay"] == 0.05


def test_the_position_projection_does_not_decay() -> None:
    model = create_model("vit_nano_p2_12", mixer="kv", mixer_options={"pos_dim": 8})
    names = model.no_weight_decay()
    assert {f"blocks.{i}.attn.mixer.pos_proj.weight" for i in range(4)} <= names
    assert all(name in dict(model.named_parameters()) for name in names if "mixer" in name)


@pytest.mark.parametrize("mixer", list_mixers())
def test_checkpointing_changes_neither_output_nor_gradients(mixer: str) -> None:
    model = create_model("vit_nano_p2_12", mixer=mixer, embed_dim=8, num_heads=2).double()
    stir(model)
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    assert other.grad_checkpointing
    x = images(model).double()
    y, grads = gradients(model, x)
    again, repeated = gradients(other, x)
    close(again, y)
    for key, grad in grads.items():
        if not grad.isnan().any():  # a blind class token leaves nothing to compare
            close(repeated[key], grad)


@every_model
def test_attention_is_where_checkpoints_expect_it(name: str) -> None:
    model = shrunk(name)
    keys = model.state_dict().keys()
    assert list(find_mixers(model)) == [f"blocks.{i}.attn.mixer" for i in range(4)]
    roles = {"static_key": ["q.weight", "key", "v.weight"], "softmax": ["qkv.weight"]}
    roles["conv_static_key"] = ["q.weight", "key_conv.weight", "key_conv.bias", "v.weight"]
    for path, mixer in find_mixers(model).items():
        for role in [*roles[mixer.mixer_name], "proj.weight", "proj.bias"]:
            assert f"{path}.{role}" in keys


@every_model
def test_every_parameter_trains(name: str) -> None:
    model = shrunk(name, drop_path_rate=0.1, drop_rate=0.1).train()
    loss = model(images(model)).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
