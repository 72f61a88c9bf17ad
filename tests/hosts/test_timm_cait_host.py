# SPDX-License-Identifier: Apache-2.0
"""Putting mixers into timm's CaiT: the patch blocks' attention, never the class blocks'."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from timm.models.cait import Cait, ClassAttn
from torch import Tensor, nn

from each import together
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import list_mixers
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close


def cait(**options: Any) -> Cait:
    defaults = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 3, "num_heads": 3}
    defaults |= {"init_values": 0.5, "num_classes": 5}
    model = Cait(**{**defaults, **options}).double().eval()
    stir(model)
    return model


def carried(theirs: nn.Module) -> dict[str, Tensor]:
    """timm's weights under the names they have behind a mixer, without the idle bias."""
    state = {}
    for key, value in theirs.state_dict().items():
        if key.startswith("blocks.") and ".attn." in key:
            if key.endswith("proj_l.bias"):
                continue
            key = key.replace(".attn.", ".attn.mixer.")  # noqa: PLW2901
            key = key.replace("proj_l", "talking_pre").replace("proj_w", "talking_post")  # noqa: PLW2901
        state[key] = value
    return state


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_places_say_what_the_host_knows() -> None:
    model = cait(qkv_bias=False, attn_drop_rate=0.1, proj_drop_rate=0.2, img_size=(8, 12))
    places = find_host(model).places(model)
    assert [p.path for p in places] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    site = places[0].site
    assert (site.dim, site.num_heads, site.grid, site.num_prefix_tokens) == (12, 3, (4, 6), 0)
    assert put_mixers(model, "mhsa") == [f"{p.path}.mixer" for p in places]
    mixer: Any = find_mixers(model)["blocks.0.attn.mixer"]
    assert (mixer.qkv.bias, mixer.attn_drop_p, mixer.proj_drop.p) == (None, 0.1, 0.2)
    assert all(type(block.attn) is ClassAttn for block in model.blocks_token_only)


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_softmax_with_talking_heads_is_timms_own_with_its_weights(qkv_bias: bool) -> None:
    theirs = cait(qkv_bias=qkv_bias)
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    mine.load_state_dict(carried(theirs), strict=True)
    close(mine(X), theirs(X))


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_every_mixer_sits_and_talks_if_it_can(mixer: str) -> None:
    model = cait()
    put_mixers(model, "ska", {"num_heads": 5, "head_dim": 8})
    put_mixers(model, mixer)
    model.double().train()
    y = model(X)
    assert y.shape == (2, 5)
    y.square().sum().backward()
    assert [k for k, p in model.named_parameters() if p.grad is None] == []
    for each in find_mixers(model).values():
        if isinstance(each, MapMixer):
            assert each.talking_post is not None
            assert each.talking_post.bias is not None, "timm's talk with a bias"
            assert each.num_heads == 3, "the host's heads, not the last mixer's"
    model.eval()
    y = model(X)
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), y)


def test_heads_can_be_set_not_to_talk() -> None:
    model = cait()
    put_mixers(model, "softmax", {"talking_heads": False})
    assert all(m.talking_post is None for m in find_mixers(model).values())


@pytest.mark.parametrize("mixer", ["ska", "mhsa", "sep_conv"])
def test_timms_models_take_a_mixer_by_name(mixer: str) -> None:
    model = create_model("cait_xxs24_224", mixer=mixer, img_size=32, num_classes=3, depth=2)
    assert type(model) is Cait
    assert len(find_mixers(model)) == 2
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
