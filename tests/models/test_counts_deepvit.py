# SPDX-License-Identifier: Apache-2.0
"""Published sizes of DeepViT: trainable parameters and multiply-adds, 224x224, 1000 classes."""

from __future__ import annotations

from typing import Any

import pytest

from costs import cost, on_meta, params
from each import together
from keymix.models.deepvit import VARIANTS

pytestmark = pytest.mark.slow  # all of them together

# parameters; multiply-adds in G; what the paper prints of parameters, in M (Tables 1, 2, 4 and 6)
ROWS = {
    "vit_12b_256": (8_406_248, 1.827, 8.15),
    "vit_12b": (18_507_112, 3.902, 18.51),
    "vit_12b_512": (32_540_136, 6.752, 33.04),  # ours; what the paper counts there is unknown
    "vit_12b_768": (86_567_656, 17.564, 86),
    "vit_16b": (24_423_784, 5.183, 24.46),
    "vit_24b": (36_257_128, 7.745, 36.26),
    "vit_32b": (48_090_472, 10.308, 48.09),
    "deepvit_16b": (24_426_664, 5.272, 24.5),
    "deepvit_24b": (36_261_448, 7.879, 36.3),
    "deepvit_32b": (48_096_232, 10.486, 48.1),
    "deepvit_s": (27_312_632, 6.361, 27),
    "deepvit_l": (55_636_016, 12.483, 55),
    "deepvit_l_420": (58_883_708, 13.149, 58),
}


@together
@pytest.mark.parametrize("name", ROWS)
def test_parameters_are_the_published(name: str) -> None:
    count, _, printed = ROWS[name]
    assert params(name) == count
    assert count / 1e6 == pytest.approx(printed, rel=0.032)


def giga(name: str, **options: Any) -> float:
    return cost(name, **options).macs / 1e9


def giga_by_blocks(name: str, **options: Any) -> float:
    """The sum over the blocks of a deep model, from models of one and two: much sooner counted."""
    row = VARIANTS[name]
    mixed = row.get("last_blocks", row["depth"]) if "last_mixer" in row else 0
    one = giga(name, depth=1, mixer="softmax", **options)
    block = giga(name, depth=2, mixer="softmax", **options) - one
    more = giga(name, depth=1, mixer="re_attention", **options) - one
    return one + (row["depth"] - 1) * block + mixed * more


@together
@pytest.mark.parametrize("name", ROWS)
def test_multiply_adds_are_the_published(name: str) -> None:
    assert round(giga_by_blocks(name), 3) == ROWS[name][1]


@pytest.mark.parametrize("name", ["vit_12b", "deepvit_s"])
def test_a_whole_model_is_the_sum_of_its_blocks(name: str) -> None:
    assert giga(name) == pytest.approx(giga_by_blocks(name), rel=1e-12)


def test_at_384_pixels_there_are_more_positions() -> None:
    large = on_meta("deepvit_l_420", img_size=384)
    assert sum(p.numel() for p in large.parameters()) == 59_043_308
    assert 59_043_308 - 58_883_708 == (24 * 24 - 14 * 14) * 420
    assert round(giga_by_blocks("deepvit_l_420", img_size=384), 2) == 44.79


def test_the_width_study_counts_once_without_the_head_and_once_at_ratio_4() -> None:
    assert params("vit_12b_256", num_classes=0) == 8_149_248  # printed as 8.15 M
    assert params("vit_12b_768", mlp_ratio=3.0) == 72_402_664  # the other rows' ratio


def test_heads_do_not_change_the_parameters() -> None:
    assert params("vit_12b_256", num_heads=4) == params("vit_12b_256")


@pytest.mark.parametrize("k", [0, 5, 11, 16])
def test_a_block_with_re_attention_has_180_parameters_more(k: int) -> None:
    # a Θ of 12 x 12, its bias, and BatchNorm's two vectors
    assert params("deepvit_16b", last_blocks=k) == 24_423_784 + k * (12 * 12 + 3 * 12)


def test_the_stem_is_what_the_patch_embedding_is_not() -> None:
    stem = 3 * 64 * 49 + 64 * 64 * 9 + 2 * 2 * 64 + 64 * 64 * 384 + 384
    patches = 3 * 256 * 384 + 384
    assert params("vit_16b", conv_stem=True) == 24_423_784 - patches + stem


@pytest.mark.parametrize(("depth", "first"), [(24, 13), (32, 17)])
def test_a_shared_block_has_no_queries_and_keys(depth: int, first: int) -> None:
    blocks = depth - first  # 11 and 15, Table 3
    saved = 2 * (384 * 384 + 384) - (12 * 12 + 3 * 12)
    shared = params(f"vit_{depth}b", shared_from=first)
    assert shared == params(f"vit_{depth}b") - blocks * saved
    assert shared == {24: 33_006_628, 32: 43_657_972}[depth]


def test_the_micro_model_is_small() -> None:
    assert params("deepvit_micro_p4_32") == 509_226
    assert params("deepvit_micro_p4_32", mixer="softmax") == 509_226 - 4 * (8 * 8 + 3 * 8)
