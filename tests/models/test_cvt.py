# SPDX-License-Identifier: Apache-2.0
"""CvT: what it is made of, other image sizes, checkpointing under BatchNorm, refusals."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from timm.layers import to_2tuple
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers, put_mixers
from keymix.mixers.registry import list_mixers, mixer_options
from keymix.models import create_model
from mixer_cases import make, stir
from tolerances import close, differs

SMALL: dict[str, Any] = {"embed_dims": (8, 12, 24), "num_heads": (1, 3, 6), "depths": (1, 1, 2)}


def small(**options: Any) -> nn.Module:
    model = create_model("cvt_13_32", **{**SMALL, **options}).double().eval()
    stir(model)
    return model


def images(height: int, width: int, count: int = 2) -> torch.Tensor:
    noise = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, height, width, generator=noise, dtype=torch.float64)


def test_a_block_is_the_papers() -> None:
    """Pre-norm with residuals; the MLP's activation is x * sigmoid(1.702 x)."""
    block = small().stages[1].blocks[0]
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    y = x + block.attn.mixer(block.norm1(x), grid=(4, 4))
    hidden = block.mlp.fc1(block.norm2(y))
    wanted = y + block.mlp.fc2(hidden * torch.sigmoid(1.702 * hidden))
    close(block(x, (4, 4)), wanted)
    assert block.mlp.fc1.out_features == 48


def test_the_class_token_is_what_the_last_stage_reads_out() -> None:
    model = small()
    assert [stage.cls_token is None for stage in model.stages] == [True, True, False]
    features = model.forward_features(images(32, 32))
    assert features.shape == (2, 5, 24)
    close(model.forward_head(features), model.head(features[:, 0]))
    model.reset_classifier(10, "avg")
    close(model.forward_head(features), model.head(features[:, 1:].mean(1)))
    model.reset_classifier(0, "")
    assert torch.equal(model.forward_head(features), features)
    pooled = small(class_token=False, global_pool="avg")
    assert pooled.forward_features(images(32, 32)).shape == (2, 4, 24)


@together
@pytest.mark.parametrize("mixer", ["softmax", "kv", "sep_conv", "pooling", "identity"])
def test_images_of_any_size_go_in_where_nothing_is_learned_a_position(mixer: str) -> None:
    model, x = small(mixer=mixer), images(40, 56)
    y = model(x)
    model.set_input_size((40, 56))
    assert model.img_size == (40, 56)
    close(model(x), y)
    built = small(mixer=mixer, img_size=(40, 56))
    built.load_state_dict(model.state_dict())
    close(built(x), y)
    sites = [[m.site for m in find_mixers(each).values()] for each in (model, built)]
    for mine, theirs in zip(*sites, strict=True):
        assert (mine.grid, mine.num_keys) == (theirs.grid, theirs.num_keys)


@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key", "random"])
def test_learned_positions_refuse_and_leave_the_model_as_it_was(mixer: str) -> None:
    model, x = small(mixer=["softmax", "softmax", mixer]), images(32, 32)
    before = model(x)
    with pytest.raises(UserError, match=rf"stages\.2.*{mixer}"):
        model.set_input_size(48)
    with pytest.raises(UserError, match=r"\(2, 2\)|5 tokens"):
        model(images(48, 48))
    assert model.img_size == (32, 32)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("policy", ["interpolate", "pool_values"])
@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key"])
def test_with_a_policy_static_keys_take_images_of_any_size(mixer: str, policy: str) -> None:
    model = small(mixer=mixer, mixer_options={"resize": policy})
    y = model(images(40, 56))
    model.set_input_size((40, 56))
    close(model(images(40, 56)), y)


def sited(mixer: str, policy: str | None) -> dict[str, Any]:
    """Arguments of a CvT with this mixer, which takes other sizes."""
    options: dict[str, Any] = {"resize": policy} if policy else {}
    options |= {"pos_dim": 6} if mixer == "key_value" else {}
    return {"mixer": mixer, "mixer_options": options, "depths": (1, 1, 1)}


RESIZABLE = [
    (name, policy)
    for name in list_mixers(domain="dense")
    for policy in (["interpolate", "pool_values"] if "resize" in mixer_options(name) else [None])
    if policy or not make(name).tied_to_grid
]


@pytest.mark.slow
@together
@pytest.mark.parametrize(("mixer", "policy"), RESIZABLE)
@pytest.mark.parametrize(("old", "new"), [(16, 32), (32, 16), (32, (48, 40))])
def test_another_size_has_the_sites_of_a_model_built_there(
    mixer: str, policy: str | None, old: int, new: Any
) -> None:
    """Down to one token a stage, where keys and tokens lie alike whatever the stride."""
    model, built = (small(img_size=size, **sited(mixer, policy)) for size in (old, new))
    x = images(*to_2tuple(new))
    y = model(x)
    assert bool(y.isfinite().all())
    homes = [m.site.key_grid or m.site.grid for m in find_mixers(model).values()]
    model.set_input_size(new)
    close(model(x), y)
    pairs = zip(find_mixers(model).values(), find_mixers(built).values(), strict=True)
    for home, (mine, theirs) in zip(homes, pairs, strict=True):
        if policy == "pool_values":
            theirs.site = replace(theirs.site, key_grid=home)
        assert mine.site.grid == theirs.site.grid
        assert mine.site.num_keys == theirs.site.num_keys
    model.set_input_size(old)
    assert bool(model(images(*to_2tuple(old))).isfinite().all())


@pytest.mark.parametrize("mixer", ["softmax", "re_attention"])
def test_checkpointing_moves_running_statistics_once(mixer: str) -> None:
    model = small(mixer=mixer).train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    x = images(32, 32)
    for each in (model, other):
        each(x).square().sum().backward()
    moved = dict(model.named_buffers())
    assert any(differs(b, torch.zeros_like(b)) for k, b in moved.items() if "running_mean" in k)
    for key, buffer in other.named_buffers():
        close(buffer.double(), moved[key].double())
    for key, p in model.named_parameters():
        close(other.get_parameter(key).grad, p.grad)


def test_features_stop_where_they_are_asked_to() -> None:
    model, x = small(), images(32, 32)
    final, found = model.forward_intermediates(x, indices=[0, 2], norm=True)
    normed = final[:, 1:].mT.reshape(2, 24, 2, 2)
    close(found[1], normed)
    tokens, early = model.forward_intermediates(x, indices=[0], stop_early=True)
    close(early[0], found[0])
    close(tokens.mT.reshape(2, 8, 8, 8), found[0])  # nothing ran behind the stage asked for
    cut = timm.create_model("cvt_13_32", features_only=True, out_indices=(0, 1), **SMALL)
    assert len(cut.model.stages) == 2
    assert [f.shape[1] for f in cut(x.float())] == [8, 12]


def test_a_cvt_copies_and_pickles() -> None:
    model, x = small(mixer="ska"), images(32, 32)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x))


def test_another_mixer_can_be_put_into_a_cvt() -> None:
    model = small(mixer="ska", kv_stride=1, attn_drop_rate=0.1, qkv_bias=False)
    assert put_mixers(model, "softmax")[0] == "stages.0.blocks.0.attn.mixer"
    made = find_mixers(model)["stages.2.blocks.1.attn.mixer"]
    assert (made.attn_drop_p, made.qkv.bias, made.site.num_keys) == (0.1, None, 5)
    assert made.qkv.weight.dtype == torch.float64


def test_drop_path_rises_over_the_blocks() -> None:
    model = small(drop_path_rate=0.3)
    rates = [getattr(b.drop_path1, "drop_prob", 0.0) for s in model.stages for b in s.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
