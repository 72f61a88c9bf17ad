# SPDX-License-Identifier: Apache-2.0
"""Options that docs/papers.md names to compute as the authors' code: each runs and changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from each import together
from keymix.mixers.spec import parse_mixer
from keymix.models import create_model
from mixer_cases import stir
from tolerances import differs

VIT: dict[str, Any] = {"depth": 1, "embed_dim": 12, "num_heads": 3}
CAIT: dict[str, Any] = {"depth": 1, "embed_dim": 12, "num_heads": 3}
BY_STAGE = "cska(scale=false)/cska(scale=false)/cska(scale=dim)"


@pytest.mark.slow
@together
@pytest.mark.parametrize(
    ("name", "base", "options"),
    [
        ("vit_small_spt_p4_32", VIT, {"shifts": "half_patch"}),
        ("vit_small_spt_p4_32", VIT, {"norm_eps": 1e-5}),
        ("ska_vit_small_spt_p4_32", VIT, {"norm_eps": 1e-5}),
        ("cska_vit_small_spt_p4_32", VIT, {"norm_eps": 1e-5}),
        ("cait_micro_p4_32", CAIT, {"norm_eps": 1e-5}),
        ("cska_cait_small_p4_32", CAIT, {"mixer_options": {"scale": False}}),
        ("cvt_micro_32", {}, {"mixer_options": {"scale": "dim"}}),
        ("cvt_micro_32", {"mixer": "ska"}, {"mixer_options": {"scale": "dim"}}),
        ("cvt_micro_32", {"mixer": ["cska"] * 3}, parse_mixer(BY_STAGE).model_kwargs()),
    ],
)
def test_the_option_changes_what_the_model_computes(
    name: str, base: dict[str, Any], options: dict[str, Any]
) -> None:
    ours = create_model(name, **base).double().eval()
    theirs = create_model(name, **{**base, **options}).double().eval()
    stir(ours)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        assert differs(ours(images), theirs(images))
