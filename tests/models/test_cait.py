# SPDX-License-Identifier: Apache-2.0
"""CaiT with any mixer: talking heads, class attention, sizes, weights at a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers, put_mixers
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import list_mixers
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close, differs

SMALL: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "depth": 3}


def micro(**options: Any) -> nn.Module:
    return create_model("cait_micro_p4_32", **{**SMALL, **options})


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_every_mixer_sits_in_every_patch_block(mixer: str) -> None:
    model = micro(mixer=mixer, img_size=(16, 24))
    found = find_mixers(model)
    assert list(found) == [f"blocks.{i}.attn.mixer" for i in range(3)]
    assert {(m.mixer_name, m.site.grid) for m in found.values()} == {(mixer, (4, 6))}
    for each in found.values():
        if isinstance(each, MapMixer):  # the family's heads talk, without biases
            assert each.talking_pre is not None
            assert each.talking_post is not None
            assert each.talking_post.bias is None
    y = model(torch.randn(2, 3, 16, 24))
    y.square().sum().backward()
    assert [k for k, p in model.named_parameters() if p.grad is None] == []


def test_the_papers_network_is_what_the_name_builds() -> None:
    with torch.device("meta"):
        model: Any = create_model("cait_small_p4_32")
    assert len(model.blocks) == 6
    assert len(model.blocks_token_only) == 2
    for block in [*model.blocks, *model.blocks_token_only]:
        assert block.mlp.fc1.out_features == 512
        assert block.gamma_1.shape == (512,)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    talking = [shape for name, shape in shapes.items() if "talking" in name]
    assert talking == [(8, 8)] * 2 * 8
    assert not any(name.endswith(("q.bias", "k.bias", "v.bias", "qkv.bias")) for name in shapes)
    assert (micro().blocks[0].gamma_2 == 0.1).all()


def test_the_backbone_is_the_same_at_a_seed_whatever_the_mixer() -> None:
    states = []
    for mixer in ("softmax", "ska", "identity"):
        torch.manual_seed(5)
        state = micro(mixer=mixer).state_dict()
        states.append({k: v for k, v in state.items() if ".mixer." not in k})
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[k], v) for k, v in states[0].items())


def test_projections_start_as_timms_and_heads_speak_for_themselves() -> None:
    model: Any = create_model("cait_micro_p4_32", mixer="ska")
    for mixer in find_mixers(model).values():
        for linear in mixer.projections:
            assert float(linear.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
        assert torch.equal(mixer.talking_pre.weight, torch.eye(4))
    for block in model.blocks_token_only:
        assert torch.equal(block.attn.talking_pre, torch.eye(4))
        assert float(block.attn.k.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_the_class_token_enters_after_the_patch_blocks() -> None:
    model = micro().double().eval()
    stir(model)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before = model.forward_features(x)
    with torch.no_grad():
        model.cls_token[..., 0] += 1.0  # a shift of all channels would end at the first norm
    after = model.forward_features(x)
    assert differs(after[:, 0], before[:, 0])
    close(after[:, 1:], before[:, 1:])


def test_it_reads_out_by_the_class_token_or_the_mean_of_patches() -> None:
    model = micro().double().eval()
    stir(model)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    features = model.forward_features(x)
    close(model(x), model.head(features[:, 0]))
    model.reset_classifier(4, "avg")
    close(model(x), model.head(features[:, 1:].mean(1)))
    pooled = micro(global_pool="avg")
    assert pooled.global_pool == "avg"


def test_a_mixer_put_later_talks_as_the_family_does() -> None:
    model = micro(mixer="identity")
    put_mixers(model, "softmax")
    assert all(m.talking_post.bias is None for m in find_mixers(model).values())


@pytest.mark.parametrize("resize", ["interpolate", "pool_values"])
@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key"])
def test_another_input_size_with_learned_keys(mixer: str, resize: str) -> None:
    model = micro(mixer=mixer, mixer_options={"resize": resize}).eval()
    x = torch.randn(1, 3, 32, 32)
    before = model(x)
    model.set_input_size(32)
    assert torch.equal(model(x), before)
    model.set_input_size((24, 40))
    assert model.pos_embed.shape == (1, 60, 12)
    assert {m.site.grid for m in find_mixers(model).values()} == {(6, 10)}
    assert model(torch.randn(1, 3, 24, 40)).shape == (1, 10)
    final, between = model.forward_intermediates(torch.randn(1, 3, 24, 40))
    assert {f.shape for f in between} == {(1, 12, 6, 10)}
    assert final.shape == (1, 61, 12)


def test_another_patch_size() -> None:
    model = micro().eval()
    model.set_input_size(patch_size=8)
    assert model.feature_info[0]["reduction"] == 8
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    assert model.pos_embed.shape == (1, 16, 12)


@pytest.mark.parametrize("mixer", ["static_key", "random", "static_key_re_attention"])
def test_another_input_size_is_refused_whole_where_positions_are_learned(mixer: str) -> None:
    model = micro(mixer=["softmax", mixer, mixer]).eval()
    x = torch.randn(1, 3, 32, 32)
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError, match=rf"blocks\.1\.attn\.mixer \(and 1 more\): .*{mixer}"):
        model.set_input_size((24, 40))
    assert torch.equal(model(x), before)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_heads_of_class_attention_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_heads=5.*class_head_dim"):
        micro(class_heads=5)
