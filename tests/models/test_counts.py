# SPDX-License-Identifier: Apache-2.0
"""Published sizes: trainable parameters of SKA's ViT rows, 32x32 images, 10 classes."""

from __future__ import annotations

import pytest

from costs import params as trainable
from each import together

ROWS = {  # SKA Tables 1 and 8; the plain rows are without shifted patches and locality attention
    "vit_small_spt_p4_32": 9_622_512,
    "vit_small_p4_32": 9_523_722,
    "ska_vit_small_spt_p4_32": 8_249_328,
    "ska_vit_small_p4_32": 8_150_538,
    "ska_vit_small_spt_p4_32_wide": 9_478_896,
    "cska_vit_small_spt_p4_32": 10_049_568,
}


@together
@pytest.mark.parametrize(("name", "count"), ROWS.items())
def test_parameters_are_the_published(name: str, count: int) -> None:
    assert trainable(name) == count


def test_a_hundred_classes_add_46170() -> None:
    assert trainable("vit_small_spt_p4_32", num_classes=100) == 9_622_512 + 46_170


def test_without_a_class_token_there_is_a_key_and_a_position_less_a_block() -> None:
    # 6 blocks with 64 keys for 65, one token and one position less
    pooled = trainable("ska_vit_small_p4_32", class_token=False, global_pool="avg")
    assert pooled == 8_147_466 - 2 * 512


@pytest.mark.parametrize(
    ("mixer", "own", "other"),
    [("static_key", "ska_vit_small_p4_32", 8_150_538), ("softmax", "vit_small_p4_32", 9_523_722)],
)
def test_a_name_is_its_mixer_put_in(mixer: str, own: str, other: int) -> None:
    assert trainable("cska_vit_small_p4_32", mixer=mixer) == trainable(own) == other


def test_a_wide_rows_mixer_can_be_replaced_by_another_at_the_hosts_heads() -> None:
    assert trainable("ska_vit_small_p4_32_wide", mixer="softmax") == 9_523_722
    assert trainable("ska_vit_small_p4_32_wide", mixer="static_key") == 8_150_538
