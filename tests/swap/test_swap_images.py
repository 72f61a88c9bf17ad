# SPDX-License-Identifier: Apache-2.0
"""Calibration images of another size than a model tells: taken where nothing is bound to that."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from tiny_models import MODELS, answer, images, refused, tiny
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.swap import gather, swap

FIXED = ["timm_vit", "timm_cait", "timm_swin", "timm_eva02", "torchvision_vit", "hugging_face_vit"]
ANY = ["timm_metaformer", "hugging_face_dinov2_registers", "keymix_cvt"]


def larger(name: str) -> tuple[int, int]:
    height, width = MODELS[name][1]
    return 2 * height, 2 * width


def naflex() -> nn.Module:
    model = timm.create_model(
        "naflexvit_base_patch16_gap", depth=2, embed_dim=12, num_heads=3, num_classes=5
    )
    out: nn.Module = model.double().eval()
    return out


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("mixer", ["softmax", "static_key"])
def test_a_model_of_one_size_is_shown_no_other(name: str, mixer: str) -> None:
    words = r"calibration images (are|of shape) .*(model takes|match|size|Wrong)"
    refused(tiny(name), words, mixer, calibration=images(larger(name)))


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("mixer", ["softmax", "pooling"])
def test_a_model_of_any_size_is_shown_any_where_no_keys_have_a_grid(name: str, mixer: str) -> None:
    if mixer == "pooling" and name != "timm_metaformer":
        mixer = "re_attention"
    model, x = tiny(name), images(larger(name))
    before = answer(model, x)
    report = swap(model, mixer, calibration=x)
    assert report.output is not None
    assert report.output.relative is not None
    after = answer(model, x)
    assert after.shape == before.shape
    if mixer == "softmax" and name != "timm_metaformer":  # whose convolutions have no queries
        assert report.output.relative < 1e-12


def test_a_model_that_reports_no_grid_is_shown_any_size() -> None:
    model, x = naflex(), images((64, 48))
    before = answer(model, x)
    report = swap(model, "softmax", calibration=x)
    assert report.output is not None
    assert torch.allclose(answer(model, x), before)


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key", "static_key_re_attention"])
@pytest.mark.parametrize("drift", [True, False])
def test_keys_are_learned_on_images_of_the_models_size(name: str, mixer: str, drift: bool) -> None:
    options: dict[str, Any] = {"calibration": images(larger(name)), "drift": drift}
    layers = "2-3" if name == "timm_metaformer" else None
    refused(tiny(name), "give images of its size", mixer, layers=layers, **options)


@pytest.mark.parametrize("name", ANY)
def test_new_keys_that_are_not_estimated_are_shown_no_other_size_either(name: str) -> None:
    words = r"learned its keys on a grid of .* tokens"
    refused(tiny(name), words, "static_key", init="fresh", calibration=images(larger(name)))


@pytest.mark.slow
def test_keys_that_sit_in_a_model_bind_it_to_its_size() -> None:
    model = tiny("timm_metaformer")
    swap(model, "static_key", 3)
    x = images(larger("timm_metaformer"))
    words = r"are 3x96x64 \(channels, height, width\) and the model takes 3x48x32"
    refused(model, words, "softmax", layers=2, calibration=x)
    free = tiny("timm_metaformer")
    swap(free, "static_key", 3, mixer_options={"resize": "interpolate"})
    swap(free, "softmax", 2, calibration=x)


def test_as_many_tokens_on_another_grid_are_not_taken_for_the_models() -> None:
    """Images on their side make as many tokens, whose keys would be of other positions."""
    model, x = tiny("timm_metaformer"), images((32, 48))
    words = r"are 3x32x48 \(channels, height, width\) and the model takes 3x48x32"
    refused(model, words, "static_key", layers="2-3", calibration=x, drift=False)
    with pytest.raises(UserError, match=words):
        gather(model, x, layers="2-3")


def test_channels_are_the_models_whatever_the_size() -> None:
    x = images(larger("timm_metaformer"))[:, :1]
    refused(tiny("timm_metaformer"), "are 1x96x64", "pooling", calibration=x)
