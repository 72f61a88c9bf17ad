# SPDX-License-Identifier: Apache-2.0
"""Models no family knows, which hold timm's attention somewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention, AttentionRope, PatchEmbed, RotaryEmbeddingCat
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.layers import find_layers
from mixer_cases import stir
from tolerances import close

X = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Own(nn.Module):
    """A user's ViT of timm's blocks, which says nothing of its prefix."""

    def __init__(self, *, positions: bool = True) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed((8, 12), 2, embed_dim=12)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        if positions:
            self.pos_embed = nn.Parameter(torch.randn(1, 25, 12))
        self.encoder = nn.Sequential(*(Block(12, 3, qk_norm=True) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        out: Tensor = self.encoder(x + self.pos_embed if hasattr(self, "pos_embed") else x)
        return out


class Rotary(nn.Module):
    """One rotary attention without patches, called with positions or not."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = RotaryEmbeddingCat(8, in_pixels=False, feat_shape=(2, 3))
        self.mix = AttentionRope(12, 1, attn_head_dim=8, num_prefix_tokens=1)

    def forward(self, x: Tensor, turning: bool = True) -> Tensor:
        out: Tensor = self.mix(x, rope=self.rope.get_embed() if turning else None)
        return out


def ready(model: nn.Module) -> Any:
    stir(model)
    return model.double().eval()


def give(mixer: nn.Module, weights: dict[str, Tensor]) -> None:
    state = mixer.state_dict()
    for leaf in ("weight", "bias"):
        if f"qkv.{leaf}" in state:
            state[f"qkv.{leaf}"] = torch.cat([weights[f"{role}.{leaf}"] for role in "qkv"])
    mixer.load_state_dict({**state, **{k: v for k, v in weights.items() if k in state}})


def to_softmax(theirs: Any) -> Any:
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    host = find_host(theirs)
    for name, mixer in find_mixers(mine).items():
        give(mixer, host.weights(theirs.get_submodule(name.removesuffix(".mixer"))))
    return mine.double()


def test_a_users_own_vit_is_served() -> None:
    model = ready(Own())
    layers = find_layers(model)
    assert [layer.path for layer in layers] == ["encoder.0.attn", "encoder.1.attn"]
    site = layers[0].place.site
    assert (site.dim, site.num_heads, site.grid, site.num_prefix_tokens) == (12, 3, (4, 6), 1)
    assert layers[0].place.extras == ("q_norm", "k_norm")
    assert (layers[1].layout(model).grid, layers[1].layout(model).prefix) == ((4, 6), 1)
    close(to_softmax(model)(X), model(X))
    put_mixers(model, "conv_static_key")
    put_mixers(model, ["sep_conv", "static_key"])
    model.double()(X).sum().backward()
    assert list(find_mixers(model)) == ["encoder.0.attn.mixer", "encoder.1.attn.mixer"]


def test_a_model_within_another_is_served() -> None:
    inner = VisionTransformer(
        img_size=(8, 12), patch_size=2, embed_dim=12, depth=2, num_heads=3, num_classes=5
    )
    model = ready(nn.Sequential(inner, nn.Linear(5, 2)))
    assert find_host(model).places(model)[1].path == "0.blocks.1.attn"
    assert find_host(model).places(model)[1].site.grid == (4, 6)
    close(to_softmax(model)(X), model(X))
    put_mixers(model, "static_key")
    assert model.double()(X).shape == (2, 2)


def test_without_a_known_prefix_no_grid_is_guessed() -> None:
    model = ready(Own(positions=False))
    assert find_host(model).places(model)[0].site.grid is None
    with pytest.raises(UserError, match="grid of its tokens"):
        find_layers(model)[0].layout(model)
    with pytest.raises(UserError, match="grid"):
        put_mixers(model, "static_key")
    assert not find_mixers(model)
    close(to_softmax(model)(X), model(X))


def test_patches_of_another_width_are_not_those_of_an_attention() -> None:
    model = ready(Own())
    model.embed_dim = 6
    assert find_host(model).places(model)[0].site.grid is None


def test_rotary_attention_turns_where_calls_bring_positions() -> None:
    model = ready(Rotary())
    mine = to_softmax(model)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    for turning in (True, False):
        close(mine(x, turning), model(x, turning))
    assert find_host(mine).places(mine)[0].extras == ("rotary positions",)
    assert (mine(x) - mine(x, False)).abs().max() > 1e-3


def sam() -> nn.Module:
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2}
    return VisionTransformerSAM(**sizes, num_heads=3, use_rel_pos=True)


def swin() -> nn.Module:
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depths": (1, 1)}
    return nn.Sequential(SwinTransformer(**sizes, num_heads=(2, 2), window_size=2))


class Doubled(Attention):
    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        return 2 * super().forward(x, attn_mask, is_causal)


def test_attention_is_served_next_to_what_only_looks_like_it() -> None:
    layers = find_layers(nn.Sequential(Attention(12, 3), Doubled(12, 3)))
    assert [layer.path for layer in layers] == ["0"]


@together
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sam, r"sam\.Attention\(x\) at blocks\.0\.attn and 1 more"),
        (swin, r"WindowAttention\(x, mask\) at 0\.layers\.0\.blocks\.0\.attn and 1 more"),
        (lambda: nn.Sequential(Doubled(12, 3)), r"Doubled\(x, attn_mask, is_causal\) at 0"),
        (lambda: timm.create_model("convit_tiny", depth=1), r"GPSA\(x\) at blocks\.0\.attn"),
        (lambda: timm.create_model("vit_base_patch16_xp_224", depth=1), r"ScalingBlock\(x"),
        (lambda: timm.create_model("efficientvit_b0"), r"LiteMLA\(x\) at"),
        (lambda: Attention(12, 3), "Attention, in which nothing is called attention"),
        (lambda: timm.create_model("resnet10t"), "ResNet, in which nothing is called attention"),
    ],
)
def test_what_only_looks_like_it_is_named_and_left_alone(make: Any, message: str) -> None:
    model = make()
    before = [type(m) for m in model.modules()]
    with pytest.raises(UserError, match=message) as error:
        put_mixers(model, "softmax")
    assert "\n" not in str(error.value)
    assert [type(m) for m in model.modules()] == before


def test_a_family_is_asked_before_what_knows_attention_alone() -> None:
    model = VisionTransformer(img_size=8, patch_size=2, embed_dim=12, depth=1, num_heads=3)
    assert find_host(model).name == "timm VisionTransformer"
    assert find_host(nn.Sequential(model)).generic
