# SPDX-License-Identifier: Apache-2.0
"""Relative positions of timm's ViTs, MaxViT and CoAtNet, and torchvision's MaxVit, stay theirs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host
from keymix.hosts.layers import find_layers
from keymix.mixers.contract import stir
from keymix.swap import swap
from tolerances import close

NOISE = torch.Generator().manual_seed(1)


def relpos(**options: Any) -> nn.Module:
    """4x6 patches."""
    sizes: dict[str, Any] = {"img_size": (8, 12), "patch_size": 2, "embed_dim": 12, "depth": 2}
    return VisionTransformerRelPos(**sizes, num_heads=3, num_classes=5, **options)


def maxxvit(name: str, blocks: str | list[str]) -> nn.Module:
    """Windows and grids of 2x3 tokens, or maps of 8x12 and the like."""
    sizes: dict[str, Any] = {"img_size": (64, 96), "depths": (1, 2), "embed_dim": (32, 64)}
    return timm.create_model(name, **sizes, stem_width=8, block_type=tuple(blocks), num_classes=5)


def torchvisions() -> nn.Module:
    return MaxVit(
        (32, 32),
        stem_channels=8,
        partition_size=4,
        block_channels=[16, 24],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
        num_classes=5,
    )


# model, images, layers, and the grid that the first sits on
MODELS: dict[str, tuple[Any, tuple[int, int], int, tuple[int, int]]] = {
    "mlp": (lambda: relpos(rel_pos_type="mlp"), (8, 12), 2, (4, 6)),
    "swin mlp": (lambda: relpos(rel_pos_type="mlp_swin", qk_norm=True), (8, 12), 2, (4, 6)),
    "class token": (
        lambda: relpos(rel_pos_type="bias", class_token=True, global_pool="token"),
        (8, 12),
        2,
        (4, 6),
    ),
    "shared": (lambda: relpos(rel_pos_type="bias", shared_rel_pos=True), (8, 12), 2, (4, 6)),
    "maxvit tf": (lambda: maxxvit("maxvit_tiny_tf_224", "MM"), (64, 96), 6, (2, 3)),
    "maxvit heads first": (lambda: maxxvit("maxvit_rmlp_pico_rw_256", "MM"), (64, 96), 6, (2, 3)),
    "coatnet": (lambda: maxxvit("coatnet_0_224", "CT"), (64, 96), 1, (8, 12)),
    "torchvision": (torchvisions, (32, 32), 4, (4, 4)),
}


def model_of(kind: str) -> Any:
    model = MODELS[kind][0]().double().eval()
    stir(model, 0.15)
    return model


def images(kind: str, batch: int = 9) -> Tensor:
    return torch.randn(batch, 3, *MODELS[kind][1], generator=NOISE, dtype=torch.float64)


@together
@pytest.mark.parametrize("kind", MODELS)
def test_softmax_in_its_place_is_its_own_attention(kind: str) -> None:
    """Outputs, and gradients of images and positions; again from a mixer, for other batches."""
    model = model_of(kind)
    mine, x = copy.deepcopy(model), images(kind, 2).requires_grad_()
    report = swap(mine, "softmax", drift=False)
    assert len(report.rows) == MODELS[kind][2]
    again = copy.deepcopy(mine)
    swap(again, "softmax", drift=False)
    gradients = []
    for each in (model, mine, again):
        close(each(x[:1]), model(x[:1]))
        out = each(x)
        close(out, model(x))
        found = [torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0]]
        out.square().sum().backward()
        found += [
            p.grad for n, p in each.named_parameters() if "rel_pos" in n or "position_bias" in n
        ]
        gradients.append(found)
    assert len(gradients[0]) > 1
    assert (
        min(max(g.abs().max() for g in some) for some in (gradients[0][:1], gradients[0][1:]))
        > 1e-9
    )
    for own, other, last in zip(*gradients, strict=True):
        close(other, own)
        close(last, own)


@pytest.mark.parametrize("kind", MODELS)
def test_maps_are_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of(kind), images(kind, 2)
    seen: list[Tensor] = []
    read: list[Tensor] = []
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda *a, **k: seen.append(softmax(*a, **k)) or seen[-1]
    )
    for layer in find_layers(model):
        layer.module.fused_attn = False
        layer.module.register_forward_hook(
            lambda _, args, kwargs, out, layer=layer: read.append(layer.map(args, kwargs)),
            with_kwargs=True,
        )
        drop = getattr(layer.module, "attn_drop", None)
        if drop is not None:
            drop.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    model(x)
    assert len(read) == len(seen) == MODELS[kind][2]
    for own, theirs in zip(read, seen, strict=True):
        close(own.reshape(theirs.shape), theirs)
        assert own.shape[0] == 2, "images first"


@together
@pytest.mark.parametrize("kind", MODELS)
def test_keys_by_position_have_positions_too_and_other_mixers_none(kind: str) -> None:
    model, x = model_of(kind), images(kind)
    place = find_host(model).places(model)[0]
    assert (place.site.grid, place.extras[0]) == (MODELS[kind][3], "relative positions")
    report = swap(model, "static_key", calibration=x)
    assert all(row.drift is not None and row.drift.output < 1 for row in report.rows)
    with_positions = model(x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel_pos" in name or "relative_position" in name:
                parameter.zero_()
    assert (model(x) - with_positions).abs().max() > 1e-9
    swap(model, "identity")
    assert not any(f"{place.path}.rel" in name for name in model.state_dict())
    assert find_host(model).places(model)[0].site.grid == MODELS[kind][3]
    swap(model, "static_key", drift=False)
    assert model(x).isfinite().all()


@together
@pytest.mark.parametrize("kind", ["mlp", "shared", "maxvit tf", "coatnet"])
def test_another_image_size_resamples_them_as_timm_does(kind: str) -> None:
    model = model_of(kind)
    mine = copy.deepcopy(model)
    swap(mine, "softmax", drift=False)
    size = (16, 8) if kind in ("mlp", "shared") else (96, 64)
    for each in (model, mine):
        each.set_input_size(size)
    x = torch.randn(2, 3, *size, generator=NOISE, dtype=torch.float64)
    close(mine(x), model(x))


def test_where_tokens_lie_is_said_of_maps_and_not_of_windows() -> None:
    assert find_layers(model := model_of("coatnet"))[0].layout(model).grid == (8, 12)
    for kind in ("maxvit tf", "torchvision"):
        with pytest.raises(UserError, match="does not know the grid of its tokens on the image"):
            find_layers(model := model_of(kind))[0].layout(model)


def test_attention_that_changes_the_width_stays() -> None:
    report = swap(model_of("coatnet"), "softmax", drift=False)
    assert [row.path for row in report.rows] == ["stages.1.blocks.1.attn"]
    assert any("stages.1.blocks.0.attn (Attention2d) stays" in note for note in report.unread)
    with pytest.raises(UserError, match=r"no adapter knows .*AttentionCl.* at stages\.0"):
        swap(maxxvit("maxvit_tiny_pm_256", ["PM", "PM"]), "softmax")


def test_a_replaced_forward_is_refused() -> None:
    model = model_of("torchvision")
    attention: Any = find_layers(model)[0].module
    attention.forward = lambda x: x
    with pytest.raises(UserError, match=r"forward of blocks.* was replaced"):
        swap(model, "softmax")


def test_positions_need_the_heads_that_they_are_of() -> None:
    with pytest.raises(UserError, match="has relative positions for 4 heads of 4"):
        swap(model_of("torchvision"), "softmax", mixer_options={"num_heads": 2})
