# SPDX-License-Identifier: Apache-2.0
"""Putting mixers into timm's Vision Transformers, again and again."""

from __future__ import annotations

import copy
import pickle
from functools import partialmethod
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import list_mixers
from mixer_cases import stir
from tolerances import close


def vit(**options: Any) -> VisionTransformer:
    defaults = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 3, "num_heads": 3}
    return VisionTransformer(**{**defaults, "num_classes": 5, **options})


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_places_say_what_the_host_knows() -> None:
    model = vit(qkv_bias=False, attn_drop_rate=0.1, proj_drop_rate=0.2, reg_tokens=2)
    places = find_host(model).places(model)
    assert [p.path for p in places] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    site = places[0].site
    assert (site.dim, site.num_heads, site.grid, site.num_prefix_tokens) == (12, 3, (4, 4), 3)
    assert put_mixers(model, "mhsa") == [f"{p.path}.mixer" for p in places]
    mixer = find_mixers(model)["blocks.0.attn.mixer"]
    assert isinstance(mixer, MapMixer)
    assert mixer.qkv.bias is None
    assert mixer.proj.bias is not None
    assert (mixer.attn_drop_p, mixer.proj_drop.p) == (0.1, 0.2)


@together
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_a_mixer_can_be_put_over_another(name: str) -> None:
    model = vit(qkv_bias=False)
    put_mixers(model, "ska", {"num_heads": 5, "head_dim": 8})
    put_mixers(model, name)
    assert model(X).shape == (2, 5)
    put_mixers(model, "softmax")
    mixer = find_mixers(model)["blocks.2.attn.mixer"]
    assert isinstance(mixer, MapMixer)
    assert (mixer.num_heads, mixer.head_dim) == (3, 4), "the host's heads, not the last mixer's"
    assert mixer.qkv.bias is None, "the host's biases, not a mixer's default"


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = vit().eval()
    before, modules = model(X), [type(b.attn) for b in model.blocks]
    with pytest.raises(UserError, match="pool_size"):
        put_mixers(model, ["softmax", "ska", "pooling"], {"pooling": {"pool_size": 2}})
    assert [type(b.attn) for b in model.blocks] == modules
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("training", [True, False])
def test_the_mixer_takes_the_hosts_mode_and_dtype(training: bool) -> None:
    model = vit(proj_drop_rate=0.5).to(torch.float64).train(training)
    put_mixers(model, "re_attention")
    for mixer in find_mixers(model).values():
        assert all(m.training == training for m in mixer.modules())
        assert all(p.dtype == torch.float64 for p in mixer.parameters())
    assert all(m.training == training for m in model.modules())


def test_masks_reach_the_mixer() -> None:
    mine, theirs = vit().double().eval(), vit().double().eval()
    stir(theirs)
    put_mixers(mine, "softmax")
    weights = {k.replace(".attn.", ".attn.mixer."): v for k, v in theirs.state_dict().items()}
    mine.load_state_dict(weights, strict=True)
    keep = torch.ones(17, 17, dtype=torch.bool).tril()
    added = torch.randn(17, 17, dtype=torch.float64)
    for mask in (keep, added, None):
        close(mine(X.double(), attn_mask=mask), theirs(X.double(), attn_mask=mask))


def test_masks_that_cannot_hold_are_refused() -> None:
    model = vit()
    put_mixers(model, "re_attention")
    with pytest.raises(UserError, match=r"re_attention.*mask"):
        model(X, attn_mask=torch.ones(17, 17, dtype=torch.bool))
    with pytest.raises(UserError, match="causal"):
        model.blocks[0].attn(torch.randn(1, 17, 12), is_causal=True)


@together
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_models_with_mixers_copy_and_pickle(name: str) -> None:
    model = vit().eval()
    put_mixers(model, name)
    y = model(X)
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), y)
    fresh = vit().eval()
    put_mixers(fresh, name)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh(X), y)


def attention(**options: Any) -> type[Attention]:
    """timm's attention with arguments that its block does not hand on."""
    return type("Chosen", (Attention,), {"__init__": partialmethod(Attention.__init__, **options)})


def test_heads_of_another_width_stay_so_wide() -> None:
    mine, theirs = (vit(attn_layer=attention(attn_head_dim=6)).double().eval() for _ in range(2))
    stir(theirs)
    put_mixers(mine, "softmax")
    weights = {k.replace(".attn.", ".attn.mixer."): v for k, v in theirs.state_dict().items()}
    mine.load_state_dict(weights, strict=True)
    close(mine(X.double()), theirs(X.double()))


@pytest.mark.parametrize("name", ["resnet18", "samvit_base_patch16_224"])
def test_models_without_an_adapter_are_refused_by_class(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UserError, match=f"{type(model).__name__}.*timm VisionTransformer"):
        put_mixers(model, "ska")
