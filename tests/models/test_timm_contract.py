# SPDX-License-Identifier: Apache-2.0
"""Every registered model is a timm model: what timm's tools ask of one, it answers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models._input import get_model_args
from timm.optim import param_groups_weight_decay
from torch import nn

from keymix.decoders.segmentation.multi_scale import KINDS
from keymix.hosts import find_mixers
from keymix.models import create_model, list_models
from mixer_cases import stir
from shrunk import (
    FAMILIES,
    answer,
    arguments,
    different,
    every_form,
    every_model,
    family_of,
    images,
    of_tensors,
    shrunk,
    wake,
)
from tolerances import close, differs


def channels_of(model: Any) -> list[int]:
    return [info["num_chs"] for info in model.feature_info]


def test_the_papers_and_the_small_models_are_there() -> None:
    assert {"vit_small_p4_32", "ska_vit_small_p4_32", "vit_nano_p2_12"} <= set(list_models())
    assert {"cska_vit_small_p4_32", "cska_vit_small_spt_p4_32"} <= set(list_models("*cska*"))
    assert all("cska" in name for name in list_models("*cska*"))


def test_every_family_is_tried() -> None:
    assert {family_of(name).path for name in of_tensors()} == {f.path for f in FAMILIES.values()}


@pytest.mark.slow
@every_model
def test_timm_makes_it_by_name(name: str) -> None:
    assert timm.is_model(name)
    model = timm.create_model(name, **arguments(name, num_classes=7)).eval()
    assert model(images(name)).shape == answer(name, 7)
    with torch.device("meta"):
        assert type(model) is type(shrunk(name))


@pytest.mark.slow
@every_model
def test_it_builds_without_memory_and_is_what_its_configuration_says(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    assert all(t.is_meta for t in (*model.state_dict().values(), *model.buffers()))
    cfg = model.pretrained_cfg
    assert cfg["architecture"] == name
    assert cfg["num_classes"] == model.num_classes
    last = model.get_submodule(cfg["classifier"])
    assert isinstance(last, nn.Conv2d if family_of(name).dense else nn.Linear)
    assert last.weight.shape[0] == cfg["num_classes"]
    assert cfg["classifier"].startswith(family_of(name).head)
    assert {f"{cfg['classifier']}.weight", f"{cfg['classifier']}.bias"} <= model.state_dict().keys()
    if name in ("setr", *KINDS):  # its backbone's, whichever it is
        assert cfg["first_conv"] is None
        return
    assert f"{cfg['first_conv']}.weight" in model.state_dict()
    first, channels = model.get_submodule(cfg["first_conv"]), cfg["input_size"][0]
    if isinstance(first, nn.Conv2d):
        assert first.in_channels == channels
    else:  # patches with their shifted copies, flattened
        assert isinstance(first, nn.Linear)
        assert first.in_features % (5 * channels) == 0


@pytest.mark.slow
@every_form
def test_features_only_gives_the_maps_and_the_configuration_says_which_is_pooled(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, features_only=True).eval()
        channels, *size = model.default_cfg["input_size"]
        maps = model(torch.zeros(1, channels, *size))
    reductions = model.feature_info.reduction()
    assert [m.shape[1] for m in maps] == model.feature_info.channels()
    assert [m.shape[2:] for m in maps] == [(size[0] // r, size[1] // r) for r in reductions]
    pooled = None if family_of(name).dense else tuple(maps[-1].shape[2:])
    assert timm.models.get_pretrained_cfg(name).pool_size == pooled
    assert model.default_cfg["pool_size"] == pooled


def test_features_of_fewer_blocks_than_a_family_gives_are_all_of_them() -> None:
    model = timm.create_model("spikformer_2_256", features_only=True, img_size=32)
    assert model.feature_info.module_name() == ["stages.0.blocks.0", "stages.0.blocks.1"]
    assert [m.shape for m in model(torch.zeros(1, 2, 32, 32))] == [(1, 256, 2, 2)] * 2
    one = timm.create_model("vit_nano_p4_12", features_only=True, depth=1)
    assert one.feature_info.module_name() == ["blocks.0"]


@pytest.mark.every_path
@every_form
def test_features_then_head_is_forward(name: str) -> None:
    model = shrunk(name).eval()
    x = images(name)
    features = model.forward_features(x)
    close(model.forward_head(features), model(x))
    before = model.forward_head(features, pre_logits=True)
    assert before.shape[:2] == (2, model.head_hidden_size)
    assert before.ndim == len(answer(name, 1))


@every_form
def test_intermediate_features_lie_on_the_grid(name: str) -> None:
    model = shrunk(name).eval()
    x = images(name)
    final, between = model.forward_intermediates(x)
    channels = channels_of(model)
    assert [f.shape[:2] for f in between] == [(2, c) for c in channels]
    reductions = [info["reduction"] for info in model.feature_info]
    for feature, reduction in zip(between, reductions, strict=True):
        assert feature.shape[2:] == tuple(side // reduction for side in x.shape[2:])
    close(final, model.forward_features(x))
    assert differs(between[0], between[-1])
    only = model.forward_intermediates(x, indices=1, intermediates_only=True)
    close(only[0], between[-1])


@every_form
def test_features_only_gives_maps(name: str) -> None:
    last, x = len(different()[name].feature_info) - 1, images(name)
    for chosen in (None, (last - 1, last), (0,)):
        wanted = {} if chosen is None else {"out_indices": chosen}
        model = timm.create_model(name, features_only=True, **wanted, **arguments(name)).eval()
        found, known = model(x), model.feature_info
        assert len(found) == (len(known.out_indices) if chosen is None else len(chosen))
        for feature, channels, reduction in zip(
            found, known.channels(), known.reduction(), strict=True
        ):
            assert feature.shape == (2, channels, x.shape[2] // reduction, x.shape[3] // reduction)


@pytest.mark.slow
@every_form
def test_the_classifier_can_be_reset(name: str) -> None:
    model, x = create_model(name, **arguments(name)).eval(), images(name, count=1)
    assert model.get_classifier() is model.get_submodule(family_of(name).head)
    for classes in (3, 42):
        model.reset_classifier(classes)
        assert model.num_classes == classes
        assert model(x).shape == answer(name, classes, count=1)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    width = model.head_hidden_size if family_of(name).dense else model.num_features
    assert model(x).shape == answer(name, width, count=1)
    none = create_model(name, **arguments(name, num_classes=0)).eval()
    assert none(x).shape == answer(name, width, count=1)


@every_form
def test_what_is_read_out_can_be_reset(name: str) -> None:
    model, x = shrunk(name).eval(), images(name, count=1)
    if family_of(name).dense:  # every token is read out
        assert "global_pool" not in inspect.signature(model.reset_classifier).parameters
        return
    model.reset_classifier(42, global_pool="avg")
    assert (model.num_classes, get_model_args(model)["global_pool"]) == (42, "avg")
    assert model(x).shape == (1, 42)
    model.reset_classifier(0, global_pool="avg")
    width, features = model.num_features, model.forward_features(x)
    assert model(x).shape == (1, width)
    model.reset_classifier(0, global_pool="")
    assert model(x).shape == features.shape
    assert differs(model(x), torch.zeros_like(features))


@every_form
def test_layers_are_grouped_by_block(name: str) -> None:
    model = different()[name]
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(p for ps in groups.values() for p in ps) == sorted(
        p for p, _ in model.named_parameters()
    )
    places = []
    for path in find_mixers(model):
        found = {g for g, ps in groups.items() for p in ps if p.startswith(f"{path}.")}
        assert len(found) <= 1, path
        places += sorted(found)
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    assert groups[min(groups)]
    coarse = timm.models.group_parameters(model, model.group_matcher(coarse=True))
    assert len(coarse) <= len(groups)
    modules = timm.models.group_modules(model, model.group_matcher())
    holding = {path for path, m in model.named_modules() if path and [*m.parameters(recurse=False)]}
    assert holding <= {path for paths in modules.values() for path in paths}


@every_form
def test_positions_and_scalars_do_not_decay(name: str) -> None:
    model = different()[name]
    names = model.no_weight_decay()
    parameters = dict(model.named_parameters())
    strange = {key.rpartition(".")[2] for key in names - parameters.keys()}
    assert strange <= {"cls_token", "dist_token", "reg_token"}  # which not every ViT of timm's has
    placed = {k for k in parameters if k.rpartition(".")[2] in ("pos_embed", "cls_token")}
    assert placed <= set(names)
    free, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=names)
    free_ids = {id(p) for p in free["params"]}
    for key, p in parameters.items():
        assert (id(p) in free_ids) == (p.ndim <= 1 or key in names), key
    assert decayed["weight_decay"] == 0.05


def test_the_position_projection_does_not_decay() -> None:
    model = create_model("vit_nano_p2_12", mixer="kv", mixer_options={"pos_dim": 8})
    names = model.no_weight_decay()
    assert {f"blocks.{i}.attn.mixer.pos_proj.weight" for i in range(4)} <= names
    assert all(name in dict(model.named_parameters()) for name in names if "mixer" in name)


def other_choice(name: str) -> dict[str, Any]:
    """A mixer that a model is not named after, with an option; nothing where none can be chosen."""
    if family_of(name).blocks == 0:
        return {}
    if family_of(name).spiking:
        return {"mixer": "spike_driven", "mixer_options": {"talking_heads": False}}
    return {"mixer": "static_key", "mixer_options": {"query_proj": False, "resize": "interpolate"}}


def in_a_folder(model: nn.Module, folder: Path) -> str:
    """Save a model as timm does, and name it as timm loads it."""
    timm.models.save_for_hf(model, str(folder), safe_serialization=True)
    return f"local-dir:{folder}"


@every_form
def test_a_folder_of_timms_is_the_model(name: str, tmp_path_factory: Any) -> None:
    model = timm.create_model(name, **{**arguments(name), **other_choice(name)})
    stir(model)
    if family_of(name).spiking:
        wake(model, images(name))
    saved = in_a_folder(model.eval(), tmp_path_factory.mktemp("saved"))
    again = timm.create_model(saved, pretrained=True).eval()
    x = images(name)
    y = model(x)
    assert torch.equal(again(x), y)
    assert differs(y[0], y[1])
    kinds = [type(mixer) for mixer in find_mixers(model).values()]
    assert [type(mixer) for mixer in find_mixers(again).values()] == kinds
    features = timm.create_model(saved, pretrained=True, features_only=True).eval()
    wanted = model.forward_intermediates(
        x, indices=[*features.feature_info.out_indices], intermediates_only=True
    )
    for found, own in zip(features(x), wanted, strict=True):
        assert torch.equal(found, own)
    others = timm.create_model(saved, pretrained=True, num_classes=42).state_dict()
    kept = {k: t for k, t in model.state_dict().items() if others[k].shape == t.shape}
    assert len(model.state_dict()) - len(kept) == 2  # weight and bias of the last layer
    assert all(torch.equal(others[key], tensor) for key, tensor in kept.items())


@every_model
def test_attention_is_where_checkpoints_expect_it(name: str) -> None:
    with torch.device("meta"):
        model = shrunk(name)
    keys = model.state_dict().keys()
    mixers = find_mixers(model)
    assert len(mixers) == family_of(name).blocks
    roles = {"static_key": ["q.weight", "key", "v.weight"], "softmax": ["qkv.weight"]}
    roles["conv_static_key"] = ["q.weight", "key_conv.weight", "key_conv.bias", "v.weight"]
    roles["re_attention"] = ["qkv.weight", "theta", "theta_bias", "norm.weight"]
    roles["key_value"] = ["kv.weight"]
    roles["sep_conv"] = ["pwconv1.weight", "dwconv.weight", "pwconv2.weight"]
    roles["qk_token"] = [f"{part}.weight" for part in ("q", "q_bn", "k", "k_bn", "proj", "proj_bn")]
    roles["spiking_self"] = [*roles["qk_token"], "v.weight", "v_bn.weight"]
    for path, mixer in mixers.items():
        assert re.fullmatch(family_of(name).path, path)
        for role in roles[mixer.mixer_name]:
            unprojected = role == "q.weight" and name == "skaformer_s18_noq"
            assert (f"{path}.{role}" in keys) is not unprojected


@every_form
def test_every_parameter_trains(name: str) -> None:
    model = shrunk(name, drop_path_rate=0.1, drop_rate=0.1).train()
    loss = model(images(name)).square().mean()
    loss.backward()
    assert [k for k, p in model.named_parameters() if p.grad is None] == []
