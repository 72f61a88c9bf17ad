# SPDX-License-Identifier: Apache-2.0
"""What a user gives, replaces values of a variant's row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from each import together
from keymix.hosts import find_mixers
from keymix.mixers.base import TokenMixer
from keymix.models import create_model
from keymix.models.family import overridden

FORMS = {
    "for all": lambda options: options,
    "by name": lambda options: {"static_key": options},
    "by alias": lambda options: {"ska": options},
    "a list": lambda options: [options],
}


def mixers(name: str, **options: Any) -> list[TokenMixer]:
    with torch.device("meta"):
        return [*find_mixers(create_model(name, **options)).values()]


@pytest.mark.parametrize("form", FORMS)
def test_options_of_every_form_join_those_of_the_row(form: str) -> None:
    given = FORMS[form]({"attn_drop": 0.25, "head_dim": 32})
    for mixer in mixers("ska_vit_small_p4_32_wide", mixer_options=given):
        assert (mixer.num_heads, mixer.head_dim, mixer.attn_drop.p) == (10, 32, 0.25)


@together
@pytest.mark.parametrize("own", [{"head_dim": 5}, {"ska": {"head_dim": 5}}, [{}, {"head_dim": 5}]])
@pytest.mark.parametrize("given", [{"static_key": {"scale": False}}, [{}, {"scale": False}]])
def test_options_of_a_row_of_several_mixers_are_joined_one_by_one(own: Any, given: Any) -> None:
    row = {"mixer": ("softmax", "static_key"), "mixer_options": own}
    joined = overridden(row, {"mixer_options": given})["mixer_options"]
    assert joined[1] == {"head_dim": 5, "scale": False}
    assert joined[0] == ({"head_dim": 5} if own == {"head_dim": 5} else {})
    assert overridden(row, {})["mixer_options"] == own
    assert overridden(row, {"mixer": "ska", "mixer_options": given})["mixer_options"] == given


@pytest.mark.parametrize(
    "given", [{"static_key": {"attn_drop": 0.25}}, [{}, {"attn_drop": 0.25}, {}, {}]]
)
def test_options_reach_one_stage_of_several(given: Any) -> None:
    shown = mixers("skaformer_s18", depths=(1, 1, 1, 1), mixer_options=given)
    assert [m.mixer_name for m in shown] == ["sep_conv", "static_key", "softmax", "softmax"]
    assert [m.attn_drop.p for m in shown[1:]] == [0.25, 0.0, 0.0]
