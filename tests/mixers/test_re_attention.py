# SPDX-License-Identifier: Apache-2.0
"""Dropout of re-attention: of the softmax's map, as peers have it, or of the final one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from keymix.errors import UserError
from keymix.mixers.base import explain_backend
from keymix.mixers.registry import create_mixer
from mixer_cases import make, tokens
from tolerances import close, differs

STAGES = ("softmax", "final")


def dropping(stage: str, **options: Any) -> Any:
    return make("re_attention", {"attn_drop": 0.4, "attn_drop_stage": stage, **options})


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_entries_of_the_softmax_are_dropped_before_heads_are_mixed(norm: str) -> None:
    """softmax, dropout, mixing, norm, times V: the order of the authors' code and vit-pytorch's."""
    mixer = dropping("softmax", norm=norm).train()
    x = tokens(mixer, 3)
    q, k, v = mixer.qkv(x).view(3, 6, 3, 3, 4).permute(2, 0, 3, 1, 4)
    torch.manual_seed(5)
    maps = F.dropout((q @ k.mT / 2).softmax(-1), 0.4)
    mixed = torch.einsum("bhij,hg->bgij", maps, mixer.theta) + mixer.theta_bias[:, None, None]
    if norm == "batch":
        mixed = F.batch_norm(mixed, None, None, mixer.norm.weight, mixer.norm.bias, training=True)
    else:
        mixed = mixer.norm(mixed.movedim(1, -1)).movedim(-1, 1)
    wanted = mixer.proj((mixed @ v).transpose(1, 2).flatten(2))
    torch.manual_seed(5)
    close(mixer(x), wanted)


def test_a_norm_sees_what_was_dropped_before_it_alone() -> None:
    variances = []
    for stage in STAGES:
        mixer = dropping(stage).train()
        mixer.norm.momentum = 1.0
        torch.manual_seed(5)
        mixer(tokens(mixer, 3))
        variances.append(mixer.norm.running_var)
    plain: Any = make("re_attention").train()
    plain.norm.momentum = 1.0
    plain(tokens(plain, 3))
    close(variances[1], plain.norm.running_var)
    assert (variances[0] > 1.2 * variances[1]).all()


def test_without_dropout_both_stages_are_one() -> None:
    one, other = (dropping(stage).eval() for stage in STAGES)
    x = tokens(one)
    assert torch.equal(one(x), other(x))
    assert torch.equal(one.attention_map(x, stage="final"), other.attention_map(x, stage="final"))
    one, other = (dropping(stage, attn_drop=0.0).train() for stage in STAGES)
    close(one(x), other(x))
    one, other = (dropping(stage).train() for stage in STAGES)
    torch.manual_seed(5)
    y = one(x)
    torch.manual_seed(5)
    assert differs(y, other(x))


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_of_rows_drop_nothing(stage: str) -> None:
    """What is drawn for a whole map cannot be drawn again a block at a time."""
    mixer = dropping(stage, backend="blocked").train()
    x = tokens(mixer)
    with pytest.raises(UserError, match="attention dropout draws for the whole map"):
        mixer(x)
    close(mixer.eval()(x), dropping(stage).eval()(x))
    large = (64, 1024, 12)
    auto = dropping(stage)
    assert explain_backend(auto.train(), shape=large).name == "reference"
    assert explain_backend(auto.eval(), shape=large).name == "blocked"


def test_another_stage_is_refused() -> None:
    with pytest.raises(UserError, match="attn_drop_stage='norm'"):
        create_mixer("re_attention", dim=12, num_heads=3, attn_drop_stage="norm")
