# SPDX-License-Identifier: Apache-2.0
"""The training of detection: crowds are left out, and examples run with made-up instances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import keymix
from keymix.errors import UserError
from keymix.models import create_model
from keymix.tasks.detection.training import TRAINING, made_up, without_crowds
from keymix.train.recipe import DataConfig, ModelConfig, Recipe

SMALL: dict[str, Any] = {
    "backbone": "caformer_micro_32",
    "backbone_size": 32,
    "num_classes": 2,
    "out_channels": 8,
    "samples": 8,
    "proposals": 20,
}


def instances(crowds: list[bool]) -> dict[str, Tensor]:
    """Instances that lie one after another, some of them crowds."""
    count = len(crowds)
    corners = torch.arange(count, dtype=torch.float32)[:, None] * 10
    return {
        "boxes": torch.cat([corners, corners, corners + 8, corners + 8], 1),
        "labels": torch.arange(count) + 1,
        "masks": torch.arange(count, dtype=torch.uint8)[:, None, None].expand(count, 50, 50),
        "iscrowd": torch.tensor(crowds, dtype=torch.bool),
        "area": torch.full((count,), 64.0),
    }


def test_crowds_are_left_out_and_nothing_else() -> None:
    kept = without_crowds(instances([False, True, False]))
    assert kept.keys() == {"boxes", "labels", "masks"}
    assert kept["labels"].tolist() == [1, 3]
    assert kept["boxes"][:, 0].tolist() == [0, 20]
    assert kept["masks"][:, 0, 0].tolist() == [0, 2]
    none = without_crowds(instances([True, True]))
    assert none["boxes"].shape == (0, 4)
    assert none["masks"].shape == (0, 50, 50)


def test_made_up_instances_fill_their_boxes() -> None:
    found = made_up(torch.zeros(3, 60, 90))
    assert len(found["boxes"]) == len(found["labels"]) == len(found["masks"]) == 9
    for (left, top, right, bottom), mask in zip(found["boxes"].int(), found["masks"], strict=True):
        assert mask[top:bottom, left:right].all()
        assert mask.sum() == (right - left) * (bottom - top)
    assert found["boxes"][-1].tolist() == [67.5, 45, 82.5, 55]


def test_an_example_trains_and_is_counted_and_measured() -> None:
    model = create_model("mask_rcnn", **SMALL)
    inputs = TRAINING.example((3, 40, 56), 2)
    assert [tuple(each.shape) for each in inputs] == [(3, 40, 56)] * 2
    loss = TRAINING.training_pass(model.train(), inputs)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    counted = keymix.count(model, (3, 40, 56), task="detection")
    assert counted.macs > 0
    assert counted.activation_bytes > 0


def test_what_is_of_classifiers_is_refused() -> None:
    recipe = Recipe(
        name="r",
        data=DataConfig(spec="coco:there"),
        model=ModelConfig(name="mask_rcnn", global_pool="avg"),
    )
    with pytest.raises(UserError, match=r"model\.global_pool"):
        TRAINING.check(recipe)
