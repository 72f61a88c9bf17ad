# SPDX-License-Identifier: Apache-2.0
"""Models without attention in runs: on images, recordings and masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import MOVING, on_masks

from keymix.errors import UserError
from keymix.recipes import get as recipe_of
from keymix.train.engine import train
from keymix.train.model import build_model, load_data, model_for
from keymix.train.recipe import Recipe, replace_path
from keymix.train.runs import load_run
from keymix.train.validate import check_recipe
from made_masks import write_uwgi
from mixer_cases import refused

MASKS: dict[str, Any] = {"model.name": "plain_unet", "model.options": {"width": 6}}
ON_RECORDINGS = replace_path(MOVING, {"model.name": "plain_convnet", "model.options": {"width": 6}})


def on_digits(**changes: Any) -> Recipe:
    small = {"model.name": "plain_convnet", "data.limit": 100, "schedule.epochs": 1}
    return replace_path(recipe_of("digits_vit"), {**small, **changes})


def test_recordings_are_taken() -> None:
    check_recipe(ON_RECORDINGS)
    model = build_model(ON_RECORDINGS, num_classes=5, in_chans=2, image_size=(16, 20), time_steps=2)
    assert model(torch.zeros(3, 2, 2, 16, 20)).shape == (3, 5)
    vit = replace_path(MOVING, {"model.name": "vit_micro_p4_32", "model.options": {}})
    with pytest.raises(UserError, match="takes images, and data 'moving_digits:100' has frames"):
        check_recipe(vit)


@pytest.mark.parametrize("recipe", [on_digits(), ON_RECORDINGS], ids=["images", "recordings"])
def test_a_mixer_of_the_recipe_is_refused(recipe: Recipe) -> None:
    steps = {"time_steps": 2} if recipe.data.time_steps else {}
    with refused("model 'plain_convnet' has no attention to replace"):
        build_model(
            replace_path(recipe, {"model.mixer": "ska"}),
            num_classes=5,
            in_chans=1,
            image_size=(16, 16),
            **steps,
        )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [on_digits(), ON_RECORDINGS], ids=["images", "recordings"])
def test_it_trains_without_a_mixer(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run")
    run = load_run(tmp_path / "run")
    model, data = run.model_and_data()
    assert run.recipe.model.mixer is None
    assert model.time_steps == data.time_steps == recipe.data.time_steps


@pytest.mark.parametrize("masks", ["exclusive", "multilabel"])
def test_outputs_per_pixel_are_those_of_the_masks(masks: str, tmp_path: Path) -> None:
    recipe = on_masks(write_uwgi(tmp_path / "uwgi"))
    recipe = replace_path(recipe, {**MASKS, "task.options": {"masks": masks}})
    data = load_data(recipe.data)
    model = model_for(recipe, data.record())
    assert model.num_classes == (3 if masks == "multilabel" else 4)
    assert model.eval()(torch.zeros(1, data.in_chans, 24, 24)).shape == (
        1,
        model.num_classes,
        24,
        24,
    )


@pytest.mark.slow
def test_it_trains_on_masks(tmp_path: Path) -> None:
    recipe = on_masks(write_uwgi(tmp_path / "uwgi"))
    train(replace_path(recipe, {**MASKS, "schedule.epochs": 3}), tmp_path / "run")
    run = load_run(tmp_path / "run")
    losses = [line["train_loss"] for line in run.metrics()]
    assert losses[-1] < losses[0]
    assert run.model().encoder.feature_info[0]["num_chs"] == 6


def test_one_value_of_a_channel_is_refused_in_a_line(tmp_path: Path) -> None:
    recipe = on_digits(**{"model.name": "test_resnet", "data.batch_size": 1, "model.options": {}})
    with pytest.raises(UserError, match=r"data\.batch_size"):
        train(recipe, tmp_path / "run")
