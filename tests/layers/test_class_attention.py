# SPDX-License-Identifier: Apache-2.0
"""Class attention: timm's where heads keep to themselves, its equation where they talk."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.cait import ClassAttn

from keymix.errors import UserError
from keymix.layers.class_attention import ClassAttention
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close


def test_with_silent_heads_it_is_timms() -> None:
    theirs = ClassAttn(12, num_heads=3, qkv_bias=True).double().eval()
    stir(theirs)
    mine = ClassAttention(12, num_heads=3, qkv_bias=True).double().eval()
    missing, unexpected = mine.load_state_dict(theirs.state_dict(), strict=False)
    assert (sorted(missing), unexpected) == (["talking_post", "talking_pre"], [])
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    close(mine(x), theirs(x))


def test_heads_are_mixed_before_and_after_the_softmax() -> None:
    layer = ClassAttention(12, num_heads=3, head_dim=5).double().eval()
    stir(layer)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (3, 5)) for f in (layer.q, layer.k, layer.v))
    logits = torch.einsum("bhd,bmhd->bhm", q[:, 0], k) / 5**0.5
    maps = torch.einsum("gh,bhm->bgm", layer.talking_pre, logits).softmax(-1)
    maps = torch.einsum("gh,bhm->bgm", layer.talking_post, maps)
    heads = torch.einsum("bhm,bmhd->bhd", maps, v)
    close(layer(x), layer.proj(heads.flatten(1))[:, None])


def test_entries_are_dropped_after_the_second_mixing() -> None:
    layer = ClassAttention(12, num_heads=3, attn_drop=0.5, proj_drop=0.3).double()
    stir(layer)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (3, 4)) for f in (layer.q, layer.k, layer.v))
    logits = torch.einsum("bhd,bmhd->bmh", q[:, 0] / 2, k)[:, None]  # [B, 1, M, h]
    maps = (logits @ layer.talking_pre.mT).softmax(-2) @ layer.talking_post.mT
    torch.manual_seed(3)
    heads = torch.einsum("bnmh,bmhd->bnhd", F.dropout(maps, 0.5), v)
    wanted = F.dropout(layer.proj(heads.flatten(2)), 0.3)
    torch.manual_seed(3)
    close(layer(x), wanted)


def test_a_models_dropout_is_that_of_patch_blocks_as_timms() -> None:
    rates = {"attn_drop_rate": 0.2, "proj_drop_rate": 0.1}
    with torch.device("meta"):
        model: Any = create_model("cait_micro_p4_32", **rates)
        theirs: Any = timm.create_model("cait_xxs24_224", depth=1, **rates)
    for name, wanted in (("blocks", {(0.2, 0.1)}), ("blocks_token_only", {(0.0, 0.0)})):
        for net in (model, theirs):
            parts = [getattr(b.attn, "mixer", b.attn) for b in getattr(net, name)]
            assert {(part.attn_drop.p, part.proj_drop.p) for part in parts} == wanted


def test_only_the_class_token_asks() -> None:
    layer = ClassAttention(12, num_heads=3).double().eval()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    order = torch.tensor([0, 3, 1, 2, 6, 5, 4])
    close(layer(x[:, order]), layer(x))
    assert layer(x).shape == (2, 1, 12)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="num_heads=5"):
        ClassAttention(12, num_heads=5)
