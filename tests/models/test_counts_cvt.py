# SPDX-License-Identifier: Apache-2.0
"""Published sizes: SKA's CvT-13 rows, 32x32 images, 10 classes (Tables 1, 8 and 9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import keymix
from keymix.models import create_model

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


def meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, **options)


@pytest.mark.parametrize(("name", "options", "params", "flops"), ROWS)
def test_costs_are_the_published(
    name: str, options: dict[str, Any], params: int, flops: str
) -> None:
    found = keymix.count(meta(name, **options), (3, 32, 32))
    assert found.params == params
    assert f"{found.flops / 1e9:.4f}" == flops


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_hundred_classes_add_the_published() -> None:
    for name, more in [("cvt_13_32", 34_650), ("ska_cvt_13_32_wide", 36_270)]:
        assert trainable(meta(name, num_classes=100)) - trainable(meta(name)) == more


def test_dropping_the_query_saves_the_published() -> None:
    # KV in SETR's CvT: a linear map with bias, a depthwise convolution and a norm a block
    every = {"kv_stride": 1}
    saved = trainable(meta("cvt_13_32", **every)) - trainable(meta("cvt_13_32", mixer="kv"))
    assert saved == 1_603_840


def test_the_small_one_is_small() -> None:
    assert trainable(meta("cvt_micro_32")) < 700_000
