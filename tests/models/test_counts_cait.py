# SPDX-License-Identifier: Apache-2.0
"""Published sizes: trainable parameters and multiply-adds of SKA's CaiT rows, 32x32 images."""

from __future__ import annotations

import pytest

from costs import cost, params

ROWS = {  # SKA Tables 1 and 8: parameters; 2 x multiply-adds in G to the printed digits
    "cait_small_p4_32": (12_685_322, 1.4085),
    "ska_cait_small_p4_32": (11_309_066, 1.2072),
    "ska_cait_small_p4_32_wide": (12_788_810, 1.3780),
    "cska_cait_small_p4_32": (12_885_002, 1.4085),
}


@pytest.mark.parametrize(("name", "row"), ROWS.items())
def test_parameters_and_multiply_adds_are_the_published(name: str, row: tuple[int, float]) -> None:
    found = cost(name)
    assert found.params == row[0]
    assert round(found.flops / 1e9, 4) == row[1]


def test_the_other_width_that_fits_the_published_row() -> None:
    name = "ska_cait_small_p4_32_wide"
    assert params(name, mixer_options={"head_dim": 61}, class_head_dim=61) == 12_651_850


def test_a_hundred_classes_add_46170() -> None:
    assert params("cait_small_p4_32", num_classes=100) == 12_685_322 + 46_170


def test_the_scale_of_the_convolutional_row_holds_no_parameter() -> None:
    name = "cska_cait_small_p4_32"
    assert params(name, mixer_options={"scale": False}) == ROWS[name][0]


@pytest.mark.parametrize(("mixer", "own"), [("ska", "ska_"), ("softmax", "")])
def test_a_name_is_its_mixer_put_in(mixer: str, own: str) -> None:
    name = f"{own}cait_small_p4_32"
    assert params("cska_cait_small_p4_32", mixer=mixer) == ROWS[name][0]


@pytest.mark.parametrize(("mixer", "own"), [("ska", "ska_"), ("softmax", "")])
def test_another_mixer_in_the_wide_row_has_the_hosts_heads(mixer: str, own: str) -> None:
    """In class attention too; unless it is asked for."""
    count = ROWS[f"{own}cait_small_p4_32"][0]
    assert params("ska_cait_small_p4_32_wide", mixer=mixer) == count
    wider = 2 * (4 * 512 * (620 - 512) + 2 * (100 - 64))
    asked = {"class_heads": 10, "class_head_dim": 62}
    assert params("ska_cait_small_p4_32_wide", mixer=mixer, **asked) == count + wider


def test_the_small_one_is_small() -> None:
    assert params("cait_micro_p4_32") < 700_000
