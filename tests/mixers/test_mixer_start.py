# SPDX-License-Identifier: Apache-2.0
"""Where mixers start, and whose default an option has: what stirred weights would hide."""

from __future__ import annotations

from typing import Unpack

import pytest
import torch

from keymix.arguments import accepted
from keymix.mixers.base import Site
from keymix.mixers.map_mixer import MapMixer, MapOptions
from keymix.mixers.registry import create_mixer


@pytest.mark.parametrize("name", ["re_attention", "static_key_re_attention"])
def test_theta_starts_as_a_one_by_one_convolution(name: str) -> None:
    torch.manual_seed(0)
    mixer = create_mixer(name, dim=256, num_heads=16, grid=(2, 2))
    for start in (mixer.theta, mixer.theta_bias):
        assert 0.5 * 16**-0.5 < start.abs().max() <= 16**-0.5
    assert mixer.theta.std().item() == pytest.approx(16**-0.5 / 3**0.5, rel=0.1)  # 256 draws


@pytest.mark.parametrize("std", [1.0, 0.02])
def test_static_keys_start_normal_with_the_asked_deviation(std: float) -> None:
    torch.manual_seed(0)
    key = create_mixer("static_key", dim=64, num_heads=4, grid=(8, 8), key_init_std=std).key
    assert key.std().item() == pytest.approx(std, rel=0.05)
    assert abs(key.mean().item()) < 0.1 * std


def test_a_subclass_default_goes_before_its_parents() -> None:
    class Unbiased(MapMixer):
        def __init__(
            self, site: Site, *, qkv_bias: bool = False, **shared: Unpack[MapOptions]
        ) -> None:
            super().__init__(site, qkv_bias=qkv_bias, **shared)

    taken = accepted(Unbiased)
    assert taken["qkv_bias"][0].default is False
    assert taken["proj_bias"][0].default is True
