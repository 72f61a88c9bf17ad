# SPDX-License-Identifier: Apache-2.0
"""``match="params"``: another mixer with about the parameters of the model's own."""

from __future__ import annotations

import pytest
import torch

from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import list_mixers, mixer_options
from keymix.models import create_model
from keymix.models.match import trainable

SMALL = {"embed_dim": 24, "num_heads": 3, "depth": 2}


@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_every_mixer_comes_near_or_stays_as_it_is(mixer: str) -> None:
    target = trainable(create_model("vit_nano_p2_12", **SMALL))
    own = trainable(create_model("vit_nano_p2_12", mixer=mixer, **SMALL))
    found = trainable(create_model("vit_nano_p2_12", mixer=mixer, match="params", **SMALL))
    if "head_dim" in mixer_options(mixer) and own < target:
        assert own < found
        assert abs(found - target) <= 0.02 * target
    else:
        assert found == own


def test_the_published_rule_finds_ten_heads_for_static_keys() -> None:
    with torch.device("meta"):
        model = create_model("vit_small_spt_p4_32", mixer="ska", match="params")
    mixers = [m for m in find_mixers(model).values() if isinstance(m, MapMixer)]
    assert {m.num_heads for m in mixers} == {10}  # SKA Table 1's wide row
    assert abs(trainable(model) - 9_622_512) < abs(9_478_896 - 9_622_512)


def test_a_match_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    plain = create_model("vit_nano_p2_12", mixer="ska", mixer_options={"num_heads": 6}, **SMALL)
    torch.manual_seed(3)
    options = {"num_heads": 6}
    same = create_model(
        "vit_nano_p2_12", mixer="ska", mixer_options=options, match="params", **SMALL
    )
    assert trainable(plain) == trainable(same), "a width set by hand stays"
    state = same.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in plain.state_dict().items())


def test_a_match_needs_another_mixer() -> None:
    with pytest.raises(UserError, match="mixer="):
        create_model("vit_nano_p2_12", match="params")
    with pytest.raises(UserError, match="unknown match 'macs'"):
        create_model("vit_nano_p2_12", mixer="ska", match="macs")  # type: ignore[arg-type]
