# SPDX-License-Identifier: Apache-2.0
"""Rollout: the row of the explicit product of all layers, and reasons where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.metaformer import Attention, LayerNormNoBias, MetaFormer
from torch import Tensor, nn

from each import together
from keymix.analysis.attention import attention_maps
from keymix.analysis.capture import At
from keymix.analysis.rollout import attention_rollout
from keymix.errors import UserError
from keymix.models import create_model
from tolerances import close


def vit(mixer: str | list[str] | None = None, **options: Any) -> nn.Module:
    small = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 3}
    how = {} if mixer is None else {"mixer": mixer}
    model = create_model("vit_tiny_patch16_224", **how, **{**small, **options})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model.double().eval()


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (16, 24)), dtype=torch.float64)


def product(model: nn.Module, x: Tensor, **which: Any) -> Tensor:
    """The whole matrix: identity half and half, rows divided by their sums, layers multiplied."""
    whole = None
    for maps in attention_maps(model, x, **which).values():
        a = 0.5 * maps.mean(1) + 0.5 * torch.eye(maps.shape[-1], dtype=maps.dtype)
        a = a / a.sum(-1, keepdim=True)
        whole = a if whole is None else a @ whole
    assert whole is not None
    return whole


@together
@pytest.mark.parametrize(
    "mixer", [None, "softmax", "static_key", "conv_static_key", "re_attention"]
)
def test_it_is_a_row_of_the_product_of_all_layers(mixer: str | None) -> None:
    model, x = vit(mixer), images()
    found = attention_rollout(model, x)
    assert (found.query, len(found.layers)) == ("cls", 3)
    close(found.weights, product(model, x)[:, 0])
    close(found.weights.sum(-1), torch.ones(2, dtype=torch.float64))
    close(found.picture, found.weights[:, 1:].reshape(2, 2, 3))


@pytest.mark.parametrize(
    ("query", "row"), [("mean", slice(1, None)), (3, slice(3, 4)), (At(1, 2), slice(6, 7))]
)
def test_other_queries_are_other_rows(query: Any, row: slice) -> None:
    model, x = vit(), images()
    close(attention_rollout(model, x, query=query).weights, product(model, x)[:, row].mean(1))


def test_without_a_class_token_it_is_the_mean_over_patches() -> None:
    model, x = vit(class_token=False, global_pool="avg"), images()
    found = attention_rollout(model, x)
    assert found.query == "mean"
    close(found.weights, product(model, x).mean(1))
    with pytest.raises(UserError, match="no class token"):
        attention_rollout(model, x, query="cls")


def test_rows_that_sum_to_no_one_are_divided_by_their_sum() -> None:
    model, x = vit("static_key", mixer_options={"activation": "relu"}), images()
    close(attention_rollout(model, x).weights, product(model, x)[:, 0])


def test_it_runs_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.analysis.capture._BUDGET", 1)
    model, x = vit(img_size=(40, 32)), images(40, 32)
    close(attention_rollout(model, x).weights, product(model, x)[:, 0])


def test_some_layers_may_be_chosen() -> None:
    model, x = vit(), images()
    found = attention_rollout(model, x, layers="0-1")
    assert found.layers == ("blocks.0.attn", "blocks.1.attn")
    close(found.weights, product(model, x, layers="0-1")[:, 0])


@pytest.mark.parametrize("query", [None, "mean", 0, At(1, 2)])
@pytest.mark.parametrize("mixer", [None, "re_attention"])
def test_maps_that_are_there_roll_out_to_the_same(mixer: str | None, query: Any) -> None:
    model, x = vit(mixer), images()
    wanted = attention_rollout(model, x, query=query)
    for heads in ("each", "mean"):
        found = attention_maps(model, x, heads=heads).rollout(query)
        close(found.weights, wanted.weights)
        assert (found.layers, found.query, found.layout) == (
            wanted.layers,
            wanted.query,
            wanted.layout,
        )


@together
@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        ({"layers": "0-1"}, "2 of 3 layers"),
        ({"queries": "cls"}, "queries='cls'"),
        ({"stage": "final"}, "stage='final'"),
    ],
)
def test_a_part_of_the_maps_does_not_roll_out(how: dict[str, Any], culprit: str) -> None:
    maps = attention_maps(vit(), images(), **how)
    with pytest.raises(UserError, match=f"{culprit}.*attention_rollout") as raised:
        maps.rollout()
    assert "\n" not in str(raised.value)


def test_a_stage_of_a_model_in_stages_is_taken_and_all_are_refused() -> None:
    model = MetaFormer(
        depths=(1, 2), dims=(32, 64), token_mixers=Attention, norm_layers=LayerNormNoBias
    )
    model = model.double().eval()
    x = images(32, 32)
    with pytest.raises(UserError, match=r"differ \(8x8; 4x4\), choose layers= of one stage"):
        attention_rollout(model, x)
    with pytest.raises(UserError, match="differ"):
        attention_maps(model, x).rollout()
    found = attention_rollout(model, x, layers="stages.1")
    close(found.weights, product(model, x, layers="stages.1").mean(1))


def test_windows_are_refused() -> None:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=12,
        depths=(2, 1),
        num_heads=(2, 3),
    )
    with pytest.raises(UserError, match=r"layers\.0\.blocks\.0\.attn stays inside windows"):
        attention_rollout(model, torch.randn(1, 3, 32, 32))
    # the window of the last stage is the image
    found = attention_rollout(model.double().eval(), images(32, 32), layers=-1)
    assert found.weights.shape == (2, 16)


def test_a_model_in_training_is_read_as_in_inference_and_left_as_it_was() -> None:
    """Convolutions before the keys are normalised over the batch in training."""
    small = {"depths": (2, 1, 1), "img_size": 32, "mixer": "key_value"}
    model = create_model("cvt_micro_32", **small).double().eval()
    x = images(32, 32)
    wanted = attention_rollout(model, x, layers="stages.0").weights
    state = {name: t.clone() for name, t in model.train().state_dict().items()}
    close(attention_rollout(model, x, layers="stages.0").weights, wanted)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert model.training
