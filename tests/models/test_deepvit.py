# SPDX-License-Identifier: Apache-2.0
"""DeepViT's comparisons: where re-attention sits, temperatures, scaled branches, shared maps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import keymix
from each import together
from keymix.analysis.similarity import map_similarity
from keymix.hosts import find_mixers
from keymix.models import create_model
from keymix.models.vit import MixerVisionTransformer
from mixer_cases import gradients, refused, stir
from tolerances import close, differs

TINY: dict[str, Any] = {
    "img_size": (32, 48),
    "embed_dim": 12,
    "depth": 4,
    "num_heads": 3,
    "num_classes": 3,
}


SHARED: dict[str, Any] = {"shared_from": 2}
MAP_SCALE = {"re_attention": {"map_scale": True}}


def tiny(name: str = "vit_12b", **options: Any) -> nn.Module:
    torch.manual_seed(4)
    model = create_model(name, **{**TINY, **options}).double()
    stir(model)
    return model


def images(count: int = 2) -> torch.Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 32, 48, generator=noise, dtype=torch.float64)


def names(model: nn.Module) -> list[str]:
    return [m.mixer_name for m in find_mixers(model).values()]


# ---- where re-attention sits ------------------------------------------------------------------


@together
@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("vit_32b", (32, 0)),
        ("deepvit_12b", (0, 12)),
        ("deepvit_32b", (0, 32)),
        ("deepvit_s", (11, 5)),
        ("deepvit_l", (20, 12)),
        ("deepvit_l_420", (20, 12)),
        ("deepvit_micro_p4_32", (8, 4)),
    ],
)
def test_the_last_blocks_have_re_attention(name: str, split: tuple[int, int]) -> None:
    with torch.device("meta"):
        model = create_model(name)
    assert names(model) == ["softmax"] * split[0] + ["re_attention"] * split[1]


@together
@pytest.mark.parametrize(("k", "there"), [(0, 0), (1, 1), (3, 3), (4, 4), (None, 4)])
def test_their_number_is_free(k: int | None, there: int) -> None:
    model = tiny("deepvit_s", last_blocks=k)
    assert names(model) == ["softmax"] * (4 - there) + ["re_attention"] * there


def test_another_mixer_stands_in_every_block() -> None:
    assert names(tiny("deepvit_s", mixer="key_value")) == ["key_value"] * 4
    mixed = tiny("deepvit_s", mixer="ska", last_mixer="static_key_re_attention", last_blocks=1)
    assert names(mixed) == ["static_key"] * 3 + ["static_key_re_attention"]
    listed = tiny("deepvit_s", mixer=["mhsa", "kv", "ska", "sep_conv"])
    assert names(listed) == ["softmax", "key_value", "static_key", "sep_conv"]


def test_options_reach_the_last_blocks_by_name() -> None:
    options = {"re_attention": {"norm": "layer"}}
    found = [*find_mixers(tiny("deepvit_s", last_blocks=2, mixer_options=options)).values()]
    assert [isinstance(m.norm, nn.LayerNorm) for m in found[2:]] == [True, True]


# ---- temperatures -----------------------------------------------------------------------------


def test_a_temperature_decays_linearly_over_the_blocks() -> None:
    model = tiny(temperature_decay=(1.0, 0.4), last_mixer="re_attention", last_blocks=2)
    factors = [4**-0.5 / m.gain() for m in find_mixers(model).values()]
    assert factors == pytest.approx([1.0, 0.8, 0.6, 0.4])
    one = [{}, {"temperature": 3.0}, {}, {}]
    own = tiny(temperature_decay=(1.0, 0.4), mixer=["mhsa"] * 4, mixer_options=one)
    assert find_mixers(own)["blocks.1.attn.mixer"].gain() == pytest.approx(4**-0.5 / 3)
    flat = tiny(temperature_decay=(1.0, 1.0))
    close(flat(images()), tiny()(images()))
    assert differs(model(images()), tiny(last_mixer="re_attention", last_blocks=2)(images()))


@pytest.mark.parametrize("more", [{}, SHARED], ids=["own maps", "shared maps"])
def test_a_decay_leaves_the_familys_defaults(more: dict[str, Any]) -> None:
    defaults = {"attn_drop": 0.2, "mask_diagonal": True, "temperature": 7.0}
    model = tiny(**more, temperature_decay=(1.0, 0.4), mixer_defaults=defaults)
    mixers = [*find_mixers(model).values()]
    assert [m.attn_drop.p for m in mixers] == [0.2] * 4
    own = mixers[: more.get("shared_from", 4)]
    assert [4**-0.5 / m.gain() for m in own] == pytest.approx([1.0, 0.8, 0.6, 0.4][: len(own)])
    assert all(m.mask_diagonal for m in own)


def test_a_learned_temperature_is_one_number_a_block() -> None:
    model = tiny(mixer_options={"temperature": True})
    extra = dict(model.named_parameters()).keys() - dict(tiny().named_parameters()).keys()
    assert extra == {f"blocks.{i}.attn.mixer.temperature" for i in range(4)}


# ---- branches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_branch_is_scaled_at_its_input_and_back_at_its_output(scale: float) -> None:
    block: Any = tiny("deepvit_s", residual_scale=scale).eval().blocks[3]
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    y = x + block.attn(block.norm1(scale * x)) / scale
    close(block(x), y + block.mlp(block.norm2(scale * y)) / scale)


def test_the_published_scales_are_off_and_change_the_answer() -> None:
    plain, x = tiny("deepvit_s").eval(), images()
    for options in ({"residual_scale": 0.5}, {"mixer_options": MAP_SCALE}):
        other = tiny("deepvit_s", **options).eval()
        other.load_state_dict(plain.state_dict())
        assert differs(other(x), plain(x))


def test_the_map_scale_multiplies_the_normalised_map() -> None:
    plain = find_mixers(tiny("deepvit_s"))["blocks.3.attn.mixer"]
    scaled = tiny("deepvit_s", mixer_options=MAP_SCALE, last_blocks=2)
    other = find_mixers(scaled)["blocks.3.attn.mixer"]
    other.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    for stage, factor in (("softmax", 1.0), ("final", 4**-0.5)):
        close(other.attention_map(x, stage=stage), factor * plain.attention_map(x, stage=stage))


# ---- shared maps ------------------------------------------------------------------------------


def test_shared_blocks_have_values_alone() -> None:
    model = tiny(**SHARED)
    assert names(model) == ["softmax", "softmax", "shared_map", "shared_map"]
    kinds = {k.split(".")[4] for k, _ in model.named_parameters() if "blocks.2.attn.mixer" in k}
    assert kinds == {"v", "theta", "theta_bias", "norm", "proj"}


def test_a_widened_block_shares_its_heads() -> None:
    wide = tiny(**SHARED, mixer_options={"num_heads": 5, "head_dim": 6})
    assert find_mixers(wide)["blocks.3.attn.mixer"].theta.shape == (5, 5)
    assert wide(images()).shape == (2, 3)


@pytest.mark.parametrize("given", ["mixer_options", "mixer_defaults"])
def test_shared_blocks_take_the_options_that_they_know(given: str) -> None:
    options = {"attn_drop": 0.3, "proj_drop": 0.2, "qkv_bias": False, "temperature": 2.0}
    model = tiny(**SHARED, attn_drop_rate=0.1, proj_drop_rate=0.1, **{given: options})
    for mixer in find_mixers(model).values():
        assert (mixer.attn_drop.p, mixer.proj_drop.p) == (0.3, 0.2)
    assert [find_mixers(model)[f"blocks.{i}.attn.mixer"].v.bias for i in (2, 3)] == [None, None]
    host = tiny(**SHARED, attn_drop_rate=0.1, proj_drop_rate=0.15)
    rates = [(m.attn_drop.p, m.proj_drop.p) for m in find_mixers(host).values()]
    assert rates == [(0.1, 0.15)] * 4


def test_a_shared_block_takes_its_own_options() -> None:
    listed = [{}, {"head_dim": 5}, {"proj_drop": 0.2}, {"head_dim": 3, "num_heads": 2}]
    mixers = [*find_mixers(tiny(**SHARED, mixer=["mhsa"] * 4, mixer_options=listed)).values()]
    assert [m.proj_drop.p for m in mixers] == [0, 0, 0.2, 0]
    assert [(m.num_heads, m.head_dim) for m in mixers[1:]] == [(3, 5), (3, 5), (3, 3)]


def test_the_norm_of_shared_maps_is_free() -> None:
    last = {"last_mixer": "re_attention", "last_blocks": 2}
    options = {"re_attention": {"norm": "layer"}, "softmax": {"attn_drop": 0.1}}
    model = tiny(**SHARED, **last, mixer_options=options)
    assert names(model)[2:] == ["shared_map"] * 2
    shared = [*find_mixers(model).values()][2:]
    assert [(type(m.norm), m.attn_drop.p) for m in shared] == [(nn.LayerNorm, 0.0)] * 2
    batch = [*find_mixers(tiny(**SHARED, **last)).values()][2:]
    assert [type(m.norm) for m in batch] == [nn.BatchNorm2d] * 2


def test_gradients_reach_everything_through_a_shared_map() -> None:
    model = tiny(**SHARED).train()
    _, grads = gradients(model, images())
    zero = {f"{p}.{z}" for p, m in find_mixers(model).items() for z in m.zero_gradients}
    assert zero == {"blocks.2.attn.mixer.theta_bias", "blocks.3.attn.mixer.theta_bias"}
    dead = {k for k, g in grads.items() if not g.abs().max() > 1e-9}
    assert dead == zero


@pytest.mark.parametrize("options", [SHARED, {"last_mixer": "re_attention"}], ids=str)
def test_checkpointing_changes_no_statistics_either(options: dict[str, Any]) -> None:
    plain = tiny(**options).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    for (key, grad), (_, again) in zip(
        *(gradients(m, images())[1].items() for m in (plain, saving)), strict=True
    ):
        close(again, grad)
        assert not grad.isnan().any(), key
    states = [m.state_dict() for m in (plain, saving)]
    assert any("running" in key for key in states[0])
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value), key


@pytest.mark.slow
def test_shared_maps_are_one_graph(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    model = tiny(depth=3, shared_from=1).train()  # a map passes through a block
    wanted = copy.deepcopy(model)(images())
    try:
        close(torch.compile(model, fullgraph=True, backend="eager")(images()), wanted)
    finally:
        torch.compiler.reset()


def test_shared_maps_are_read_like_others() -> None:
    model = tiny(**SHARED).train()
    maps = keymix.attention_maps(model, images())
    assert len(maps) == 4
    for later in ("blocks.2.attn.mixer", "blocks.3.attn.mixer"):
        close(maps[later], maps["blocks.1.attn.mixer"])
    final = keymix.attention_maps(model, images(), stage="final", queries=[0, 3])
    assert differs(final["blocks.2.attn.mixer"], final["blocks.3.attn.mixer"])
    assert final["blocks.2.attn.mixer"].shape == (2, 3, 2, 7)
    assert len(map_similarity(model, images()).adjacent) == 3


def test_a_mask_is_refused_where_a_map_is_shared() -> None:
    mask = torch.ones(7, 7, dtype=torch.bool)
    assert tiny()(images(), attn_mask=mask).shape == (2, 3)
    with refused("take no attention mask"):
        tiny(**SHARED)(images(), attn_mask=mask)


def test_other_image_sizes_are_taken() -> None:
    model = tiny("deepvit_s", **SHARED, last_blocks=0).eval()
    model.set_input_size((48, 16))
    assert {m.site.grid for m in find_mixers(model).values()} == {(3, 1)}
    assert model(torch.randn(1, 3, 48, 16, dtype=torch.float64)).shape == (1, 3)


# ---- features, as timm gives them -------------------------------------------------------------


@together
@pytest.mark.parametrize(
    "asked",
    [
        {"indices": [0, 2]},
        {"indices": 2, "norm": True},
        {"indices": [1], "stop_early": True, "output_fmt": "NLC"},
        {"indices": [1, 3], "return_prefix_tokens": True},
        {"indices": [3], "intermediates_only": True},
        {"indices": [0], "output_dict": True, "return_prefix_tokens": True},
        {"indices": [0], "output_dict": True, "intermediates_only": True},
    ],
    ids=str,
)
def test_intermediate_features_are_timms(asked: dict[str, Any]) -> None:
    model = tiny(last_mixer="re_attention", last_blocks=2).eval()
    found = model.forward_intermediates(images(), **asked)
    theirs = super(MixerVisionTransformer, model).forward_intermediates(images(), **asked)
    flat, _ = torch.utils._pytree.tree_flatten(found)
    wanted, _ = torch.utils._pytree.tree_flatten(theirs)
    assert len(flat) == len(wanted)
    assert not isinstance(found, dict) or found.keys() == theirs.keys()
    for mine, their in zip(flat, wanted, strict=True):
        assert mine.shape == their.shape
        close(mine, their)


def test_shared_maps_reach_the_features_too() -> None:
    model = tiny(**SHARED).eval()
    final, kept = model.forward_intermediates(images(), indices=[2, 3], output_fmt="NLC", norm=True)
    close(final, model.forward_features(images()))
    close(kept[1], final[:, 1:])
    getter = create_model("vit_12b", **TINY, **SHARED, features_only=True, out_indices=(1, 3))
    assert [f.shape for f in getter(images().float())] == [(2, 12, 2, 3)] * 2
