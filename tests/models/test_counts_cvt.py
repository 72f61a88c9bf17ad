# SPDX-License-Identifier: Apache-2.0
"""Published sizes: SKA's CvT-13 rows, 32x32 images, 10 classes (Tables 1, 8 and 9)."""

from __future__ import annotations

from typing import Any

import pytest

from costs import cost, params

pytestmark = pytest.mark.slow  # all of them together

NO_TOKEN = {"class_token": False, "global_pool": "avg"}
LATER = {"embed_dims": (64, 195, 402)}  # widths of the paper's CIFAR-100 run

# trainable parameters, and FLOPs (2 x multiply-adds) in G to the digits that were worked out
ROWS: list[tuple[str, dict[str, Any], int, str]] = [
    ("cvt_13_32", {}, 19_616_330, "0.2008"),
    ("cvt_13_32", NO_TOKEN, 19_615_946, "0.1653"),
    ("ska_cvt_13_32", {}, 18_022_730, "0.1941"),
    ("ska_cvt_13_32_wide", {}, 19_694_000, "0.2109"),
    ("ska_cvt_13_32_wide", LATER, 19_655_243, "0.2100"),
    ("cska_cvt_13_32", {}, 18_112_490, "0.1960"),
]


@pytest.mark.parametrize(("name", "options", "count", "flops"), ROWS)
def test_costs_are_the_published(
    name: str, options: dict[str, Any], count: int, flops: str
) -> None:
    found = cost(name, (3, 32, 32), **options)
    assert found.params == count
    assert f"{found.flops / 1e9:.4f}" == flops


def test_a_hundred_classes_add_the_published() -> None:
    for name, more in [("cvt_13_32", 34_650), ("ska_cvt_13_32_wide", 36_270)]:
        assert params(name, num_classes=100) - params(name) == more


def test_dropping_the_query_saves_the_published() -> None:
    # KV in SETR's CvT: a linear map with bias, a depthwise convolution and a norm a block
    every = {"kv_stride": 1}
    saved = params("cvt_13_32", **every) - params("cvt_13_32", mixer="kv")
    assert saved == 1_603_840


def test_the_small_one_is_small() -> None:
    assert params("cvt_micro_32") < 700_000
