# SPDX-License-Identifier: Apache-2.0
"""Published sizes: trainable parameters and multiply-adds of SKA's Swin rows, 32x32 images."""

from __future__ import annotations

from typing import Any

import pytest

from costs import cost_of
from costs import on_meta as built
from keymix.models.match import trainable

MASKS = 3_072  # the published counts of the SKA rows hold so many numbers of masks; ours do not
HEADS = {"mixer": ["ska"] * 4, "mixer_options": [{"num_heads": h, "head_dim": 32} for h in
                                                 (3, 6, 16, 32)]}  # fmt: skip
ROWS: list[tuple[str, dict[str, Any], int, float | None]] = [
    # SKA Tables 1 and 8: parameters; 2 x multiply-adds in G to the printed digits
    ("swin_tiny_p2_32", {}, 26_598_646, 1.0568),
    ("ska_swin_tiny_p2_32", {}, 24_580_342 - MASKS, 0.9718),
    ("ska_swin_tiny_p2_32", {"shared_keys": True}, 24_515_830 - MASKS, 0.9718),
    ("ska_swin_tiny_p2_32_wide", {}, 26_644_342 - MASKS, 1.0542),
    ("swin_tiny_p2_32", HEADS, 26_665_206 - MASKS, 1.0392),
    ("cska_swin_tiny_p2_32", {}, 25_665_910 - MASKS, None),
    ("cska_swin_tiny_p2_32", {"shared_keys": True}, 25_083_286 - MASKS, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "params", "flops"), ROWS)
def test_parameters_and_multiply_adds_are_the_published(
    name: str, options: dict[str, Any], params: int, flops: float | None
) -> None:
    model = built(name, **options)
    assert trainable(model) == params
    assert sum(p.numel() for p in model.parameters()) == params  # what never trains is a buffer
    if flops is not None:
        assert round(cost_of(model).flops / 1e9, 4) == flops


def test_a_hundred_classes_add_69210() -> None:
    assert trainable(built("swin_tiny_p2_32", num_classes=100)) == 26_598_646 + 69_210


def test_six_masks_of_a_shift_are_what_the_published_counts_add() -> None:
    """Two of 16 x 16 numbers in each shifted block; ours lie in buffers, one per window."""
    model = built("swin_tiny_p2_32")
    shifted = [b for stage in model.layers for b in stage.blocks if any(b.shift_size)]
    assert [b.shift_size for b in shifted] == [(2, 2)] * 6
    assert 2 * 16 * 16 * len(shifted) == MASKS
    assert [tuple(b.attn_mask.shape) for b in shifted] == [
        (16, 16, 16),
        (4, 16, 16),
        *[(1, 16, 16)] * 4,
    ]
    assert not any("mask" in key or "index" in key for key in model.state_dict())


def test_grids_and_windows_are_the_papers() -> None:
    model = built("ska_swin_tiny_p2_32")
    assert [stage.output_resolution for stage in model.layers] == [(16, 16), (8, 8), (4, 4), (4, 4)]
    keys = [stage.blocks[0].attn.mixer.key.shape for stage in model.layers]
    assert keys == [(16, 3, 16, 32), (4, 6, 16, 32), (12, 16, 32), (24, 16, 32)]
    tables = {b.attn.relative_position_bias_table.shape for s in model.layers for b in s.blocks}
    assert tables == {(49, 1)}
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 8]


def test_the_small_one_is_small() -> None:
    assert trainable(built("swin_micro_p2_32")) < 700_000
