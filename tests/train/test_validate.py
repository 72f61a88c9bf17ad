# SPDX-License-Identifier: Apache-2.0
"""What does not fit is refused before its data is read, and before a folder of the run is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from keymix import recipes
from keymix.data import load
from keymix.data.specs import DataSpec
from keymix.errors import UserError
from keymix.train import engine
from keymix.train.engine import train
from keymix.train.parts import OF_CLASSES as _OF_CLASSES
from keymix.train.recipe import DataConfig, LossConfig, ModelConfig, Recipe, replace_path
from keymix.train.validate import check_recipe

OF_CLASSES = {
    "label_smoothing": LossConfig(label_smoothing=0.1),
    "mixup": LossConfig(mixup=0.2),
    "cutmix": LossConfig(cutmix=0.2),
    "similarity": LossConfig(similarity=0.5),
    "distill": LossConfig(distill=0.5, distill_teacher="teacher-run"),
}


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("digits_vit", {"data.spec": "moving_digits:100"}, r"augment\.crop_padding=1 does not fit"),
        (
            "moving_digits_qkformer",
            {"model.name": "vit_micro_p4_32"},
            "model 'vit_micro_p4_32' takes images, and data 'moving_digits' has frames of events",
        ),
        ("moving_digits_qkformer", {"model.name": "qkformer_micro"}, "unknown model"),
        ("moving_digits_qkformer", {"model.mixer": "qktoken"}, "unknown mixer 'qktoken'"),
        ("moving_digits_qkformer", {"optim.name": "adamww"}, "unknown optimiser"),
        (
            "moving_digits_qkformer",
            {"data.spec": "digits"},
            r"data\.time_steps = 4: data digits holds images, not events.* or take a recipe for "
            r"images, such as digits_vit or small_images",
        ),
        (
            "moving_digits_qkformer",
            {"data.spec": "digits", "data.time_steps": None},
            r"augment\.snn_wide=True does not fit images, .*Set it to false, or take a recipe",
        ),
    ],
)
def test_a_recipe_that_cannot_fit_is_refused_before_its_data_is_opened(
    name: str,
    changed: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(*_: object, **__: object) -> None:
        pytest.fail("the data was read")

    monkeypatch.setattr(engine, "load_data", opened)
    with pytest.raises(UserError, match=message):
        train(replace_path(recipes.get(name), changed), tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"augment.auto_augment": "rand-m9"}, r"augment\.auto_augment='rand-m9' changes images"),
        ({"model.options": {"depth": 0}}, "depth=0"),
    ],
)
def test_what_only_the_data_shows_is_refused_before_a_folder_is_made(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    recipe = replace_path(recipes.get("digits_vit"), {"data.limit": 100} | changed)
    with pytest.raises(UserError, match=message):
        train(recipe, tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()


def test_settings_of_events_are_refused_before_images_are_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DataSpec, "open", lambda *_: pytest.fail("the data was opened"))
    with pytest.raises(UserError, match=r"data\.frames_by = 'time': data digits holds images"):
        load("digits", frames_by="time")


@pytest.mark.parametrize("name", sorted({*OF_CLASSES, *_OF_CLASSES}))
def test_losses_of_classes_are_refused_for_masks(name: str) -> None:
    recipe = Recipe(
        name="masks",
        data=DataConfig(spec="uwgi:scans"),
        model=ModelConfig(name="setr_micro"),
        loss=OF_CLASSES[name],
    )
    with pytest.raises(UserError, match=rf"loss\.{name} = .*: is for classes of whole images"):
        check_recipe(recipe)
