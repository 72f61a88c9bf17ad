# SPDX-License-Identifier: Apache-2.0
"""Fewer keys than tokens in every model that hosts mixers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from each import each
from keymix.errors import UserError
from keymix.hosts.base import find_mixers
from keymix.mixers.static_key import LearnedKeys
from keymix.models import create_model, set_image_size
from keymix.models.weights import load_weights
from keymix.swap import swap
from shrunk import FAMILIES, QUICK, arguments, family_of, forms_of, images

PLAIN = [line for line, family in FAMILIES.items() if family.blocks and not family.spiking]
every_family = pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in PLAIN]
)


def built(name: str, mixer: str, **options: object) -> nn.Module:
    wide = family_of(name).wide if name.endswith("_wide") else {}
    own = {"key_grid": "1/4", **wide, **options}
    return create_model(name, **arguments(name, mixer=mixer, mixer_options=own))


def keyed(model: nn.Module) -> list[LearnedKeys]:
    found = [m for m in find_mixers(model).values() if isinstance(m, LearnedKeys)]
    assert found
    return found


@every_family
@each("name", forms_of, of="family")
def test_every_model_takes_fewer_keys(name: str) -> None:
    for mixer in ("static_key", "conv_static_key"):
        if (
            "swin" in name or "_spt_" in name
        ):  # masks of tokens: none of keys that stand for several
            with pytest.raises(UserError, match=r"key_grid=|keys lie on"):
                built(name, mixer)
            continue
        model = built(name, mixer)
        for each_of in keyed(model):
            wanted = tuple(math.floor(side / 2 + 0.5) for side in each_of.site.grid)
            assert each_of.key_grid == wanted
        x = images(name)
        answer = model(x)
        (answer if isinstance(answer, torch.Tensor) else answer[0]).sum().backward()
        assert all(m.q.weight.grad is not None for m in keyed(model))
        before = [m.key_grid for m in keyed(model)]
        larger = F.interpolate(x, scale_factor=2)
        set_image_size(model.eval(), tuple(larger.shape[-2:]))
        model(larger)
        assert [m.key_grid for m in keyed(model)] == before


@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key", "static_key_re_attention"])
def test_another_policy_does_not_bring_back_a_key_for_every_token(mixer: str) -> None:
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mixer_options": {"key_grid": "1/4"}}
    model = create_model("vit_micro_p4_32", mixer=mixer, **options).eval()
    with pytest.raises(UserError, match=r"key_grid='1/4'.*resize='interpolate'.*choose one"):
        set_image_size(model, (48, 48), resize="interpolate")
    set_image_size(model, (48, 48), resize="pool_values")
    assert [m.key_grid for m in keyed(model)] == [(4, 4), (4, 4)]


def test_weights_of_fewer_keys_load_where_the_keys_are_as_many() -> None:
    size = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mixer": "static_key"}
    few = {"mixer_options": {"key_grid": "4x4"}}
    trained = create_model("vit_micro_p4_32", **size, **few).eval()
    larger = create_model("vit_micro_p4_32", img_size=48, **size, **few).eval()
    x = torch.randn(2, 3, 48, 48)
    load_weights(larger, trained.state_dict())
    set_image_size(trained, (48, 48))
    assert torch.equal(larger(x), trained(x))
    share = create_model("vit_micro_p4_32", img_size=48, **size, mixer_options={"key_grid": "1/4"})
    with pytest.raises(UserError, match="key_grid"):
        load_weights(share, trained.state_dict())


def test_few_keys_swapped_into_a_trained_model_start_from_its_own() -> None:
    torch.manual_seed(0)
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    model = create_model("vit_micro_p4_32", **options).eval()
    x = torch.randn(32, 3, 32, 32)
    drift = {}
    for estimate in ("least_squares", "mean", None):
        made, calibrated = copy.deepcopy(model), {}
        if estimate is not None:
            calibrated = {"calibration": x, "estimate": estimate}
        swap(made, "static_key", mixer_options={"key_grid": "1/4"}, **calibrated)
        assert [m.key_grid for m in keyed(made)] == [(4, 4), (4, 4)]
        drift[estimate] = (made(x) - model(x)).norm().item()
    assert drift["least_squares"] < drift[None]
    assert drift["mean"] < drift[None]


def test_a_shared_map_of_fewer_keys_meets_as_many_values() -> None:
    options = {"mixer": "static_key", "mixer_options": {"key_grid": "1/4"}, "shared_from": 1}
    model = create_model("deepvit_micro_p4_32", **arguments("deepvit_micro_p4_32", **options))
    x = images("deepvit_micro_p4_32")
    assert model(x).isfinite().all()
    shared = model.blocks[1].attn.mixer
    assert shared.key_grid == model.blocks[0].attn.mixer.key_grid == (4, 6)
