# SPDX-License-Identifier: Apache-2.0
"""Further vision transformers of Hugging Face: each fact once, on two tiny blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keymix
from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers
from keymix.hosts.layers import find_layers
from keymix.mixers.contract import stir
from keymix.swap import swap
from tolerances import close

transformers = pytest.importorskip("transformers", minversion="5.20")

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 4}
SMALL |= {"intermediate_size": 32, "image_size": 12}
FAMILIES: dict[str, tuple[dict[str, Any], int, bool]] = {
    # configuration, prefix tokens, and whether tokens lie on a known grid
    "CLIPVisionModel": ({}, 1, True),
    "SiglipVisionModel": ({}, 0, True),
    "DINOv3ViTModel": ({"num_register_tokens": 2}, 3, True),
    "BeitModel": ({"use_relative_position_bias": True}, 1, True),
    "DPTModel": ({}, 1, True),
    "IJepaModel": ({}, 0, True),
    "ViTMSNModel": ({}, 1, True),
    "YolosModel": ({"image_size": (12, 12), "num_detection_tokens": 3}, 1, False),
    "ViTMAEModel": ({"mask_ratio": 0.0}, 1, False),
}
X = torch.randn(9, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model_of(name: str) -> Any:
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{**SMALL, **FAMILIES[name][0]})).double().eval()
    stir(model)
    return model


def answer(model: nn.Module) -> Tensor:
    torch.manual_seed(0)  # MAE draws an order of its patches
    with torch.no_grad():
        return model(X).last_hidden_state  # type: ignore[no-any-return]


@together
@pytest.mark.parametrize("name", FAMILIES)
def test_softmax_in_its_place_changes_nothing(name: str) -> None:
    model = model_of(name)
    before = answer(model)
    site = find_host(model).places(model)[1].site
    _, prefix, known = FAMILIES[name]
    assert (site.num_prefix_tokens, site.grid) == (prefix, (3, 3) if known else None)
    report = swap(model, "softmax", calibration=None if "MAE" in name else X)
    assert len(report.rows) == 2
    close(answer(model), before)
    assert all(row.drift is None or row.drift.map < 1e-12 for row in report.rows)
    swap(model, "identity")
    assert (answer(model) - before).abs().max() > 1e-3


@together
@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_those_that_the_library_returns(name: str) -> None:
    model = model_of(name)
    model.set_attn_implementation("eager")
    seen: list[Tensor] = []
    for layer in find_layers(model):
        layer.module.register_forward_hook(
            lambda _, args, kwargs, out, layer=layer: seen.append(layer.map(args, kwargs)),
            with_kwargs=True,
        )
    torch.manual_seed(0)
    wanted = model(X, output_attentions=True).attentions
    assert len(wanted) == len(seen) == 2
    for own, theirs in zip(seen, wanted, strict=True):
        close(own, theirs, torch.float32)  # some softmax in single precision


@together
@pytest.mark.parametrize("name", FAMILIES)
def test_keys_by_position_need_tokens_that_lie_on_a_grid(name: str) -> None:
    model = model_of(name)
    if FAMILIES[name][2]:
        swap(model, "static_key", calibration=X)
        keys = {mixer.key.shape[1] for mixer in find_mixers(model).values()}
        assert keys == {FAMILIES[name][1] + 9}
        assert answer(model).isfinite().all()
    else:
        with pytest.raises(UserError, match=r"how tokens lie at .* is not known") as error:
            swap(model, "static_key")
        assert "token_grid" not in str(error.value)  # of no use here


def test_one_part_of_a_model_is_served_and_text_is_left_alone() -> None:
    vision = {**SMALL, "projection_dim": 8}
    text = {k: v for k, v in SMALL.items() if "size" not in k or "hidden" in k} | {"vocab_size": 9}
    config = transformers.CLIPConfig(vision_config=vision, text_config=text)
    model = nn.Sequential(transformers.CLIPModel(config))
    report = swap(model, "softmax", drift=False)
    assert [row.path for row in report.rows] == [
        f"0.vision_model.encoder.layers.{i}.self_attn" for i in (0, 1)
    ]
    assert any("text_model" in note for note in report.unread)


def test_a_file_rebuilds_one_of_them(tmp_path: Path) -> None:
    model = model_of("DINOv3ViTModel")
    swap(model, "static_key", calibration=X)
    keymix.save_swapped(model, tmp_path / "swapped.safetensors")
    again = keymix.load_swapped(tmp_path / "swapped.safetensors").eval()
    close(answer(again), answer(model))
    close(answer(copy.deepcopy(model)), answer(model))


def test_relative_positions_need_the_heads_that_they_are_of() -> None:
    model = model_of("BeitModel")
    with pytest.raises(UserError, match="has relative positions for 3 heads of 8"):
        swap(model, "softmax", mixer_options={"num_heads": 2})
