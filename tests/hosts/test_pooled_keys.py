# SPDX-License-Identifier: Apache-2.0
"""Spatial reduction where hosts add biases, rotate or norm keys: exact wherever nothing is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.hosts.head_norms import HeadFinish, Turn
from keymix.ops import resample
from keymix.swap.run import swap
from mixer_cases import close, stir

SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
MODELS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {**SMALL, "img_size": 64},  # biases of relative positions
    "eva02_tiny_patch14_224": {**SMALL, "img_size": 56},  # rotary positions
    "deit3_small_patch16_224": {**SMALL, "img_size": 64},
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(name, **MODELS[name]).double().eval()
    stir(model, 0.1)
    size = MODELS[name]["img_size"]
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_the_full_grid_is_the_model_itself_and_fewer_keys_are_near(name: str) -> None:
    model, images = made(name)
    wanted = model(images)
    far = float((wanted - wanted.mean(0)).abs().max())
    for grid, exact in (("1/1", True), ("1/4", False)):
        swapped = copy.deepcopy(model)
        swap(swapped, f"spatial_reduction(key_grid={grid})")
        if exact:
            close(swapped(images), wanted)
        else:
            off = float((swapped(images) - wanted).abs().max())
            assert 0 < off < far, (off, far)
            keys = next(iter(find_mixers(swapped).values())).key_grid_for((4, 4))
            assert keys == (2, 2)


def test_it_follows_static_keys_that_had_no_grid_of_their_own() -> None:
    model, images = made(next(iter(MODELS)))
    swap(model, "static_key")
    swap(model, "spatial_reduction")
    assert next(iter(find_mixers(model).values())).key_grid_for((4, 4)) == (2, 2)
    assert model(images).isfinite().all()


def test_keys_of_averaged_tokens_turn_by_the_average_of_their_codes() -> None:
    turn = Turn()
    finish = HeadFinish(None, turn, prefix=1)
    angles = torch.randn(16, 4, dtype=torch.float64)
    rope = torch.cat((angles.sin(), angles.cos()), -1)
    keys = torch.randn(2, 3, 5, 4, dtype=torch.float64)  # a prefix token and 2x2 cells

    def pool(rows: Tensor) -> Tensor:
        return resample.pool(rows, 0, (4, 4), (2, 2))

    with turn.to(rope):
        few = finish(keys, pool)
        # every token of a cell turns the cell's key; their mean is what the averaged code gives
        spread = keys[..., 1:, :].unflatten(-2, (2, 2)).repeat_interleave(2, -3)
        spread = spread.repeat_interleave(2, -2).flatten(-3, -2)
        turned = finish(torch.cat((keys[..., :1, :], spread), -2))
    close(few, resample.pool(turned, 1, (4, 4), (2, 2)))


def test_shifted_windows_refuse_it_and_the_others_do_not() -> None:
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        **{"img_size": 56, "embed_dim": 24, "depths": (2,), "num_heads": (4,), "num_classes": 5},
    )
    with pytest.raises(UserError, match=r"blocks\.1\.attn"):
        swap(swin, "spatial_reduction")
    swap(swin, "spatial_reduction", 0)
    assert swin(torch.randn(1, 3, 56, 56)).isfinite().all()
