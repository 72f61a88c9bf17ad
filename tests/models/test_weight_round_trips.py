# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that took another size load into one that was built there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keymix.models import create_model, load_weights
from mixer_cases import stir
from shrunk import family_of

FAMILIES = ["vit_micro_p4_32", "cait_micro_p4_32", "cvt_micro_32", "caformer_micro_32"]
MIXERS: list[tuple[str, dict[str, Any]]] = [
    ("static_key", {}),
    ("conv_static_key", {}),
    ("key_value", {"pos_dim": 8}),
    ("softmax", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("mixer", "options"), MIXERS)
def test_a_resampled_model_loads_where_one_was_built(
    name: str, mixer: str, options: dict[str, Any]
) -> None:
    if mixer != "softmax":
        options = {**options, "resize": "interpolate"}
    small = {"mixer": mixer, "mixer_options": options, **family_of(name).options}
    made = create_model(name, **small).eval()
    stir(made)
    made.set_input_size(img_size=48)
    built = create_model(name, **small, img_size=48).eval()
    loaded = load_weights(built, made.state_dict(), img_size=48)
    assert loaded.missing == loaded.resized == loaded.unused == ()
    assert set(loaded.copied) == set(made.state_dict())
    x = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(built(x), made(x))
