# SPDX-License-Identifier: Apache-2.0
"""What is captured is what the forward pass used: map times V, projected, is the layer's output."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.metaformer import (
    Attention,
    LayerNorm2dNoBias,
    LayerNormNoBias,
    MetaFormer,
    Pooling,
)
from torch import Tensor, nn

from each import together
from keymix.hosts.layers import find_layers
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer, get_mixer_class, list_mixers
from tolerances import close

MAPPED = [
    name for name in list_mixers(domain="dense") if issubclass(get_mixer_class(name), MapMixer)
]


def bolder(module: nn.Module) -> nn.Module:
    """Larger weights, so that maps are far from even."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module.double().eval()


@together
@pytest.mark.parametrize("name", MAPPED)
def test_a_mixers_output_is_its_captured_map_times_v(name: str) -> None:
    mixer = create_mixer(name, dim=12, num_heads=3, grid=(2, 5), num_prefix_tokens=1)
    assert isinstance(mixer, MapMixer)
    bolder(mixer)
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    with torch.no_grad():
        v = mixer.inputs(x, (2, 5))["v"]
        gathered = mixer.attention_map(x, stage="final") @ v
        close(mixer.output(gathered, x), mixer(x))


SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": (16, 24), "patch_size": 8, "embed_dim": 12, "depth": 2},
    "deit_tiny_distilled_patch16_224": {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 12,
        "depth": 1,
    },
    "cait_xxs24_224": {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1},
    "swin_tiny_patch4_window7_224": {"img_size": (40, 56), "window_size": 4, "embed_dim": 12},
    "caformer_s18": {},
}
HEADS = {"num_heads": 3}


def small(name: str) -> tuple[nn.Module, Tensor]:
    options = {**SMALL[name], **({} if name == "caformer_s18" else HEADS)}
    if name.startswith("swin"):
        options |= {"depths": (2, 1), "num_heads": (2, 3)}
    if name == "caformer_s18":
        model: nn.Module = MetaFormer(
            depths=(1, 1),
            dims=(8, 32),
            token_mixers=[Pooling, Attention],
            norm_layers=[LayerNorm2dNoBias, LayerNormNoBias],
        )
    else:
        model = timm.create_model(name, **options)
    size = options.get("img_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    return bolder(model), torch.randn(2, 3, height, width, dtype=torch.float64)


@together
@pytest.mark.parametrize("name", SMALL)
def test_a_plain_attentions_output_is_its_captured_map_times_v(name: str) -> None:
    model, x = small(name)
    layers = [each for each in find_layers(model) if hasattr(each.module, "qkv")]
    assert layers
    calls: dict[str, tuple[Any, ...]] = {}
    for layer in layers:
        if hasattr(layer.module, "fused_attn"):  # not where heads talk: that cannot be fused
            layer.module.fused_attn = True
        layer.module.register_forward_hook(
            lambda m, args, kwargs, out, path=layer.path: calls.update({path: (args, kwargs, out)}),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(x)
        for layer in layers:
            args, kwargs, out = calls[layer.path]
            own: Any = layer.module
            read = layer.reading(args, kwargs)
            y = layer.map(args, kwargs, stage="final") @ read.v
            close(own.proj(y.transpose(-3, -2).flatten(-2)).reshape(out.shape), out)
