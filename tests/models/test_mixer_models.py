# SPDX-License-Identifier: Apache-2.0
"""Models with any mixer: one, or one per block; weights at a seed; sizes; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers.registry import list_mixers
from keymix.models import create_model
from mixer_cases import refused, stir
from tolerances import close

SMALL: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "depth": 4}


def nano(**options: Any) -> nn.Module:
    return create_model("vit_nano_p2_12", **{**SMALL, **options})


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
@pytest.mark.parametrize("class_token", [True, False])
def test_every_mixer_sits_in_every_block(mixer: str, class_token: bool) -> None:
    model = nano(mixer=mixer, class_token=class_token)
    assert [m.mixer_name for m in find_mixers(model).values()] == [mixer] * 4
    y = model(torch.randn(2, 1, 12, 12))
    assert y.shape == (2, 10)
    y.square().sum().backward()
    assert all(p.grad is not None for k, p in model.named_parameters() if "attn" in k)


def test_one_mixer_a_block() -> None:
    names = ["sep_conv", "cska", "softmax", "kv"]
    model = nano(mixer=names, mixer_options={"kv": {"pos_dim": 4}, "sep_conv": {"kernel_size": 5}})
    found = list(find_mixers(model).values())
    assert [m.mixer_name for m in found] == ["sep_conv", "conv_static_key", "softmax", "key_value"]
    assert found[0].dwconv.kernel_size == (5, 5)
    assert found[3].pos_dim == 4
    listed = nano(mixer=names, mixer_options=[{}, {"kernel_size": 1}, {}, {}])
    assert find_mixers(listed)["blocks.1.attn.mixer"].key_conv.kernel_size == (1, 1)


def test_the_backbone_is_the_same_at_a_seed_whatever_the_mixer() -> None:
    states = []
    for mixer in list_mixers(domain="dense"):
        torch.manual_seed(5)
        state = nano(mixer=mixer).state_dict()
        states.append({k: v for k, v in state.items() if ".attn." not in k})
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[k], v) for k, v in states[0].items())
    torch.manual_seed(6)
    other = nano(mixer="softmax").state_dict()
    assert not torch.equal(other["patch_embed.proj.weight"], states[0]["patch_embed.proj.weight"])


def test_projections_start_as_timms() -> None:
    model = create_model("vit_micro_p4_32", mixer="ska")
    for mixer in find_mixers(model).values():
        for linear in mixer.projections:
            assert float(linear.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
            assert linear.bias is not None
            assert (linear.bias == 0).all()


@pytest.mark.parametrize("name", ["vit_small_p4_32", "vit_micro_p4_32", "vit_nano_p2_12"])
def test_with_softmax_it_is_timms_own_model(name: str) -> None:
    mine = create_model(name, **SMALL).double().eval()
    stir(mine)
    theirs = VisionTransformer(
        img_size=mine.patch_embed.img_size[0],
        patch_size=mine.patch_embed.patch_size[0],
        in_chans=mine.default_cfg["input_size"][0],
        num_classes=10,
        mlp_ratio=1.0 if "small" in name else 2.0,
        qkv_bias="small" not in name,
        class_token="nano" not in name,
        global_pool="avg" if "nano" in name else "token",
        **SMALL,
    )
    theirs = theirs.double().eval()
    weights = {k.replace(".attn.mixer.", ".attn."): v for k, v in mine.state_dict().items()}
    theirs.load_state_dict(weights, strict=True)
    x = torch.randn(2, *mine.default_cfg["input_size"], dtype=torch.float64)
    close(mine(x), theirs(x))


@together
@pytest.mark.parametrize("mixer", ["softmax", "key_value", "re_attention", "sep_conv", "pooling"])
def test_input_size_can_change_where_nothing_is_learned_a_position(mixer: str) -> None:
    model = nano(mixer=mixer).eval()
    model.set_input_size((16, 20))
    assert model(torch.randn(1, 1, 16, 20)).shape == (1, 10)
    assert {m.site.grid for m in find_mixers(model).values()} == {(8, 10)}
    with pytest.raises((AssertionError, UserError)):
        model(torch.randn(1, 1, 12, 12))


@together
@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("static_key", {}),
        ("conv_static_key", {}),
        ("random", {}),
        ("static_key_re_attention", {}),
        ("key_value", {"pos_dim": 4}),
    ],
)
def test_input_size_is_refused_where_positions_are_learned(mixer: str, options: Any) -> None:
    model = nano(mixer=["softmax", "softmax", mixer, "softmax"], mixer_options={mixer: options})
    model.eval()
    x = torch.randn(1, 1, 12, 12)
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    says = rf"blocks\.2\.attn\.mixer: mixer '{mixer}'.*\(6, 6\).*for the new image size"
    with pytest.raises(UserError, match=says) as caught:
        model.set_input_size((16, 20))
    if mixer != "random":
        assert "mixer_options={'resize': …}" in str(caught.value)
    assert torch.equal(model(x), before)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_images_need_not_be_square(mixer: str) -> None:
    model = nano(mixer=mixer, img_size=(8, 20))
    assert {m.site.grid for m in find_mixers(model).values()} == {(4, 10)}
    assert model(torch.randn(2, 1, 8, 20)).shape == (2, 10)


def test_registers_are_prefix_tokens_too() -> None:
    model = nano(mixer="ska", class_token=True, reg_tokens=3)
    assert find_mixers(model)["blocks.0.attn.mixer"].key.shape == (3, 4 + 36, 4)
    assert model(torch.randn(2, 1, 12, 12)).shape == (2, 10)


@pytest.mark.parametrize("mixer", ["ska", "mhsa", "sep_conv"])
def test_a_timm_vit_takes_a_mixer_by_name(mixer: str) -> None:
    model = create_model("vit_tiny_patch16_224", mixer=mixer, img_size=32, num_classes=3, depth=2)
    assert type(model) is VisionTransformer
    assert len(find_mixers(model)) == 2
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_a_timm_vit_with_softmax_put_in_computes_the_same_with_its_weights() -> None:
    options = {"img_size": 32, "depth": 2, "num_classes": 3}
    theirs = timm.create_model("vit_tiny_patch16_224", **options).double().eval()
    stir(theirs)
    mine = create_model("vit_tiny_patch16_224", mixer="softmax", **options).double().eval()
    weights = {k.replace(".attn.", ".attn.mixer."): v for k, v in theirs.state_dict().items()}
    mine.load_state_dict(weights, strict=True)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    close(mine(x), theirs(x))


@pytest.mark.parametrize("mixer", ["softmax", "kv", "re_attention"])
def test_timms_dynamic_image_sizes_work_where_places_are_one(mixer: str) -> None:
    model = create_model(
        "vit_tiny_patch16_224", mixer=mixer, img_size=32, depth=1, dynamic_img_size=True
    )
    assert model(torch.randn(1, 3, 48, 64)).shape == (1, 1000)
    fixed = create_model(
        "vit_tiny_patch16_224", mixer="ska", img_size=32, depth=1, dynamic_img_size=True
    )
    with pytest.raises(UserError, match=r"learned its keys.*\(2, 2\).*13 tokens"):
        fixed(torch.randn(1, 3, 48, 64))


def test_everything_builds_on_the_meta_device() -> None:
    for mixer in list_mixers(domain="dense"):
        with torch.device("meta"):
            model = nano(mixer=mixer)
        assert all(t.is_meta for t in model.state_dict().values())


@together
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixer": "skaa"}, "unknown mixer 'skaa'.*'ska'"),
        ({"mixer": ["ska", "ska"]}, "2 mixers.*4, one per block"),
        ({"mixer": "ska", "mixer_options": {"activaton": "relu"}}, "activaton.*'activation'"),
        ({"mixer": "ska", "mixer_options": {"activation": "rulu"}}, "rulu"),
        ({"mixer": "ska", "mixer_options": {"kv": {"pos_dim": 4}}}, "key_value.*static_key"),
        ({"mixer": "ska", "mixer_options": [{}, {}]}, "2 mixer_options for 1 mixers"),
        ({"mixer": "ska", "mixer_options": {"attn_drop": 2.0}}, "attn_drop"),
        ({"num_heads": 5}, "divi"),
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"dept": 3}, "'dept'.*'depth'"),
        ({"mixer": 3}, "mixer=3 must be"),
        ({"img_size": (12,)}, r"img_size=\(12,\).*height"),
        ({"img_size": "12"}, "img_size='12'"),
        ({"drop_path_rate": 2.0}, "drop_path_rate=2.0.*probability"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    with refused(says):
        nano(**options)


def test_options_join_those_of_the_name_and_another_mixer_leaves_them_behind() -> None:
    with torch.device("meta"):
        unscaled = create_model("ska_vit_small_p4_32_wide", mixer_options={"scale": False})
        other = timm.create_model("ska_vit_small_p4_32_wide", mixer="kv")
    mixers = [*find_mixers(unscaled).values()]
    assert {(m.num_heads, m.scale) for m in mixers} == {(10, 1.0)}
    assert {m.num_heads for m in find_mixers(other).values()} == {8}
