# SPDX-License-Identifier: Apache-2.0
"""What timm's own attention reads as is what its unfused path really does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models import metaformer as timms
from timm.models.cait import Cait
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from each import together
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts import put_mixers
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.layers import Layer, find_layers
from mixer_cases import stir
from tolerances import close

SMALL: dict[str, Any] = {"img_size": (8, 12), "patch_size": 2, "embed_dim": 12, "depth": 2}
SMALL |= {"num_heads": 3, "num_classes": 5}
NOISE = torch.Generator().manual_seed(1)
X = torch.randn(2, 3, 8, 12, generator=NOISE, dtype=torch.float64)


def ready(model: nn.Module) -> Any:
    stir(model)
    return model.double().eval()


def named(name: str) -> nn.Module:
    """A model of timm's by name, as small as :data:`SMALL`."""
    with torch.device("cpu"):
        return timm.create_model(name, **SMALL)


def swin(**options: Any) -> Any:
    """12x8 tokens in 4x4 windows, blocks in turn shifted; 6x4 in the next stage, padded."""
    sizes: dict[str, Any] = {"img_size": (24, 16), "patch_size": 2, "embed_dim": 12}
    sizes |= {"depths": (2, 2), "num_heads": (2, 3), "window_size": 4, "num_classes": 5}
    return ready(SwinTransformer(**{**sizes, **options}))


def caformer() -> Any:
    return ready(
        timms.MetaFormer(
            token_mixers=[timms.SepConv, timms.Pooling, timms.Attention],
            norm_layers=[timms.LayerNorm2dNoBias] * 2 + [timms.LayerNormNoBias],
            head_dim=8,
            depths=(1, 1, 2),
            dims=(8, 16, 32),
            num_classes=5,
        )
    )


MODELS: dict[str, Any] = {
    "plain": lambda: VisionTransformer(**SMALL),
    "registers": lambda: VisionTransformer(
        **SMALL, reg_tokens=2, class_token=False, global_pool="avg"
    ),
    "no_bias_wide_heads": lambda: VisionTransformer(**SMALL, qkv_bias=False, proj_bias=False),
    "norms": lambda: VisionTransformer(**SMALL, qk_norm=True, scale_attn_norm=True),
    "siglip": lambda: named("vit_base_patch16_siglip_224"),
    "dinov2": lambda: named("vit_small_patch14_reg4_dinov2"),
    "deit": lambda: named("deit_tiny_distilled_patch16_224"),
    "cait": lambda: Cait(**SMALL),
}


def calls_of(model: nn.Module, layers: list[Layer], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments, output and applied map of the attention of every layer in one forward pass."""
    seen: dict[str, Any] = {}
    hooks = []
    for layer in layers:
        layer.module.fused_attn = False

        def keep(_: Any, given: Any, named: Any, out: Any, path: str = layer.path) -> None:
            seen.setdefault(path, {}).update(args=given, kwargs=named, out=out)

        def apply(_: Any, given: Any, out: Any, path: str = layer.path) -> None:
            seen.setdefault(path, {})["map"] = out

        hooks.append(layer.module.register_forward_hook(keep, with_kwargs=True))
        hooks.append(layer.module.get_submodule("attn_drop").register_forward_hook(apply))
    model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return seen


def output(attention: Any, read: Reading, x: Tensor) -> Tensor:
    """What the attention itself would return, from a reading: A V, norm, gate, projection."""
    y = (read.map(stage="final") @ read.v).transpose(-3, -2).flatten(-2)
    y = attention.norm(y) if hasattr(attention, "norm") else y
    if getattr(attention, "gate", None) is not None:
        y = y * attention.gate(x).sigmoid()
    return attention.proj(y)


@together
@pytest.mark.parametrize("kind", MODELS)
def test_a_reading_is_the_map_that_the_unfused_module_applies(kind: str) -> None:
    model = ready(MODELS[kind]())
    layers = find_layers(model)
    assert [layer.path for layer in layers] == ["blocks.0.attn", "blocks.1.attn"]
    seen = calls_of(model, layers, X)
    for layer in layers:
        call = seen[layer.path]
        read = layer.reading(call["args"], call["kwargs"])
        close(read.map(stage="final"), call["map"])
        x = call["args"][0]
        close(output(layer.module, read, x), call["out"])
        close(layer.map(call["args"], call["kwargs"], [3, 1]), read.map()[..., [3, 1], :])
        prefix = layer.layout(model).prefix
        assert (layer.layout(model).grid, prefix + 24) == ((4, 6), x.shape[1])


@pytest.mark.parametrize("causal", [True, False])
def test_masks_of_a_call_are_part_of_its_reading(causal: bool) -> None:
    model = ready(VisionTransformer(**SMALL))
    layers = find_layers(model)
    keep = None if causal else torch.rand(25, 25, generator=NOISE) < 0.7
    if keep is not None:
        keep[:, 0] = True
    seen = calls_of(model, layers, X, attn_mask=keep, is_causal=causal)
    call = seen["blocks.1.attn"]
    read = layers[1].reading(call["args"], call["kwargs"])
    close(read.map(), call["map"])
    assert bool((read.map()[..., 0, 1:] == 0).all()) == causal


def test_a_layout_is_that_of_the_last_call_where_sizes_change() -> None:
    model = ready(VisionTransformer(**SMALL, dynamic_img_size=True))
    layer = find_layers(model)[0]
    assert layer.layout(model).grid == (4, 6)
    model(torch.randn(1, 3, 6, 4, dtype=torch.float64))
    assert layer.layout(model).grid == layer.layout(model).key_grid == (3, 2)
    put_mixers(model, "static_key", {"resize": "pool_values"})
    model.double()(torch.randn(1, 3, 6, 10, dtype=torch.float64))
    layout = find_layers(model)[0].layout(model)
    assert (layout.grid, layout.key_grid, layout.prefix) == ((3, 5), (4, 6), 1)


def test_dropped_patches_are_read_as_they_come() -> None:
    model = ready(VisionTransformer(**SMALL, patch_drop_rate=0.5)).train()
    layers = find_layers(model)
    seen = calls_of(model, layers, X)
    call = seen["blocks.0.attn"]
    read = layers[0].reading(call["args"], call["kwargs"])
    assert read.map().shape == (2, 3, 13, 13)
    close(read.map(), call["map"])
    assert layers[0].layout(model).grid == (4, 6)


def windows_as_an_axis(applied: Tensor, like: Tensor) -> Tensor:
    return applied.reshape(like.shape)


@pytest.mark.parametrize("dynamic", [False, True])
def test_swin_reads_windows_as_an_axis(dynamic: bool) -> None:
    model = swin(strict_img_size=not dynamic)
    layers = find_layers(model)
    size = (32, 24) if dynamic else (24, 16)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    seen = calls_of(model, layers, x)
    counts = []
    for layer in layers:
        call = seen[layer.path]
        read = layer.reading(call["args"], call["kwargs"])
        layout = layer.layout(model)
        assert layout.windows is not None
        counts.append((layout.grid, layout.window, layout.windows, layout.shift))
        assert read.q.shape[:2] == (2, layout.windows[0] * layout.windows[1])
        close(windows_as_an_axis(call["map"], read.map()), read.map())
        close(output(layer.module, read, call["args"][0]).flatten(0, 1), call["out"])
    if dynamic:
        assert counts[:2] == [
            ((16, 12), (4, 4), (4, 3), (0, 0)),
            ((16, 12), (4, 4), (4, 3), (2, 2)),
        ]
    else:
        assert counts == [
            ((12, 8), (4, 4), (3, 2), (0, 0)),
            ((12, 8), (4, 4), (3, 2), (2, 2)),
            ((6, 4), (4, 4), (2, 1), (0, 0)),
            ((6, 4), (4, 4), (2, 1), (2, 0)),
        ]


def test_swin_says_what_it_needs_to_count_its_windows() -> None:
    model = swin()
    attention = model.layers[0].blocks[0].attn
    from keymix.hosts import find_host

    with pytest.raises(UserError, match="find_layers"):
        find_host(model).reading(attention, (torch.zeros(6, 16, 12).double(),), {})
    layer = find_layers(model)[0]
    model(torch.randn(1, 3, 24, 16, dtype=torch.float64))
    with pytest.raises(UserError, match="5 windows"):
        layer.reading((torch.zeros(5, 16, 12).double(),), {})
    copied = copy.deepcopy(model)
    x = torch.randn(1, 3, 24, 16, dtype=torch.float64)
    copied(x)
    assert find_layers(copied)[0].reading((torch.zeros(6, 16, 12).double(),), {}).q.shape[1] == 6


@pytest.mark.parametrize("mixer", ["softmax", "static_key"])
def test_hosted_windows_lie_where_the_hosts_own_lay(mixer: str) -> None:
    model = swin()
    before = [layer.layout(model) for layer in find_layers(model)]
    put_mixers(model, mixer)
    model.double()(torch.randn(1, 3, 24, 16, dtype=torch.float64))
    layers = find_layers(model)
    assert [layer.layout(model) for layer in layers] == before
    assert layers[1].path == "layers.0.blocks.1.attn.mixer"


def test_metaformer_reads_its_attention_and_names_what_is_none() -> None:
    model = caformer()
    layers = find_layers(model)
    x = torch.randn(2, 3, 64, 48, dtype=torch.float64)
    attention = layers[2:]
    seen = calls_of(model, attention, x)
    for layer in attention:
        call = seen[layer.path]
        read = layer.reading(call["args"], call["kwargs"])
        close(read.map(), call["map"])
        close(output(layer.module, read, call["args"][0]), call["out"])
        assert layer.layout(model).grid == (4, 3)
    assert layers[0].layout(model).grid == (16, 12)
    for layer, name in zip(layers, ("SepConv", "Pooling"), strict=False):
        with pytest.raises(NoAttentionMap, match=f"{name} of timm's MetaFormer"):
            layer.map((x,), {})
        with pytest.raises(UserError, match=name):
            layer.host.weights(layer.module)


@pytest.mark.parametrize("kind", ["plain", "no_bias_wide_heads", "cait", "deit"])
def test_weights_by_role_project_as_the_module_does(kind: str) -> None:
    model = ready(MODELS[kind]())
    layer = find_layers(model)[0]
    weights = layer.host.weights(layer.module)
    put_mixers(model, "softmax")
    mixer: Any = find_layers(model)[0].mixer
    state = mixer.state_dict()
    joined = {"qkv.weight": torch.cat([weights.pop(f"{role}.weight") for role in "qkv"])}
    if "q.bias" in weights:
        joined["qkv.bias"] = torch.cat([weights.pop(f"{role}.bias") for role in "qkv"])
    given = joined | weights
    assert given.keys() == state.keys()
    mixer.load_state_dict(given)
    x = torch.randn(2, 25, 12, dtype=torch.float64)
    close(mixer.double()(x), layer.module(x))
    own = {id(p) for p in layer.module.parameters()}
    assert not any(id(t) in own or t.requires_grad for t in given.values())


def test_a_projection_that_is_no_linear_map_is_named() -> None:
    class Wrapped(nn.Sequential):  # as an adapter of low rank wraps a linear map
        in_features, bias = 12, None

    model = ready(VisionTransformer(**SMALL))
    attention = model.blocks[0].attn
    x = torch.randn(2, 25, 12, dtype=torch.float64)
    wanted = find_layers(model)[0].map((x,), {})
    attention.qkv = Wrapped(attention.qkv)
    layer = find_layers(model)[0]
    close(layer.map((x,), {}), wanted)
    with pytest.raises(UserError, match="qkv of Attention is Wrapped"):
        layer.host.weights(layer.module)
    attention.qkv = nn.Sequential(attention.qkv)
    with pytest.raises(UserError, match="qkv of Attention is Sequential"):
        find_layers(model)


def test_cvt_lays_its_keys_by_their_stride() -> None:
    import keymix

    model = keymix.create_model("cvt_micro_32", num_classes=3).eval()
    layers = find_layers(model)
    model(torch.randn(1, 3, 40, 24))
    layouts = [layer.layout(model) for layer in layers]
    assert layouts[0].grid != layouts[-1].grid
    for layer, layout in zip(layers, layouts, strict=True):
        keys = layer.place.site.key_grid_on(layout.grid)
        assert layout.key_grid == (keys or layout.grid)
        assert layout.key_grid != layout.grid
