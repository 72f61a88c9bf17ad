# SPDX-License-Identifier: Apache-2.0
"""The KV paper's recipes: published settings, the model each name says, and the small one."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
import torch

from each import together
from keymix import recipes
from keymix.data.specs import task_name
from keymix.hosts import find_mixers
from keymix.models.factory import task_of_model
from keymix.models.match import trainable
from keymix.train.model import build_model

FIVE = {"flip", "vertical_flip", "shift_scale_rotate", "coarse_dropout", "brightness_contrast"}
# parameters with four classes; mixer; the published Jaccard and weighted Jaccard
ROWS = {
    "setr_qkv_uwgi": (90_889_028, "softmax", 0.8718, 0.8653),
    "setr_kv_uwgi": (83_801_924, "key_value", 0.8727, 0.8667),
    "setr_kv_pos_uwgi": (83_802_536, "key_value", 0.8750, 0.8691),
    "setr_qkv_ce_uwgi": (102_980_484, "softmax", 0.8990, 0.8946),
    "setr_kv_ce_uwgi": (95_893_380, "key_value", 0.9015, 0.8960),
    "setr_qkv_cvt_uwgi": (22_933_380, "softmax", 0.8846, 0.8786),
    "setr_kv_cvt_uwgi": (21_329_540, "key_value", 0.8807, 0.8755),
}


@together
@pytest.mark.parametrize("name", ROWS)
def test_the_model_is_the_one_the_recipe_names(name: str) -> None:
    recipe = recipes.get(name)
    with torch.device("meta"):
        model = build_model(recipe, num_classes=4, in_chans=3, image_size=(224, 224))
    params, mixer, _, _ = ROWS[name]
    assert trainable(model) == params
    assert {m.mixer_name for m in find_mixers(model).values()} == {mixer}
    coded = {getattr(m, "pos_dim", 0) for m in find_mixers(model).values()}
    assert coded == {50 if "pos" in name else 0}


@together
@pytest.mark.parametrize("name", ROWS)
def test_it_has_the_published_settings_and_figures(name: str) -> None:
    recipe = recipes.get(name)
    assert recipe.data.spec.startswith("uwgi:")
    assert (recipe.data.image_size, recipe.data.batch_size) == (224, 32)
    assert recipe.data.workers == 8  # the set is read lazily
    assert recipe.data.val_fraction == pytest.approx(16 / 96)  # of what the test split leaves
    assert (recipe.optim.name, recipe.optim.lr) == ("adamw", 1e-4)
    schedule = recipe.schedule
    assert (schedule.name, schedule.power, schedule.epochs) == ("poly", 0.9, 100)
    assert schedule.warmup_epochs == 0
    assert {key for key, value in asdict(recipe.augment).items() if value is True} == FIVE
    assert (recipe.model.weights, recipe.task.options) == (None, {})
    figures = re.search(r"Jaccard (0\.\d+), weighted Jaccard (0\.\d+)", recipes.notebook(name))
    assert figures is not None
    assert (float(figures[1]), float(figures[2])) == ROWS[name][2:]


def test_variants_differ_from_the_baseline_in_the_model_alone() -> None:
    baseline = recipes.get("setr_qkv_uwgi")
    for name in ROWS:
        recipe = recipes.get(name)
        assert replace(recipe, name=baseline.name, model=baseline.model) == baseline


def test_recipes_for_masks_have_models_for_masks() -> None:
    for name in (*ROWS, "small_masks_unet"):
        recipe = recipes.get(name)
        assert task_name(recipe.data.spec) == task_of_model(recipe.model.name) == "segmentation"
