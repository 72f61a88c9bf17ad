# SPDX-License-Identifier: Apache-2.0
"""DeepViT's recipes: published settings, the model each name says, the notebooks' own commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from notebooks import as_typed, commands
from torch import nn

from keymix import recipes
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models.match import trainable
from keymix.train.engine import train
from keymix.train.model import build_model
from keymix.train.recipe import Recipe, replace_path

# parameters at the recipe's own image size and 1000 classes; blocks with re-attention
MODELS = {
    "deepvit_imagenet": (36_261_448, 24),
    "deepvit_depth": (18_507_112, 0),
    "deepvit_deit": (27_312_632, 5),
    "deepvit_384": (59_043_308, 12),
}
# what each command of the notebook makes: parameters, re-attention, shared
COMMANDS = {
    "vit-24b": (36_257_128, 0, 0),
    "deepvit-l": (55_636_016, 12, 0),
    "decayed": (48_090_472, 0, 0),
    "learnable": (48_090_472 + 32, 0, 0),
    "dropped": (48_090_472, 0, 0),
    "shared": (43_657_972, 0, 15),
    "last-5": (24_423_784 + 5 * 180, 5, 0),
    "unlike": (36_257_128, 0, 0),
    "as-the-code": (36_261_448, 24, 0),
}


def built(recipe: Recipe) -> nn.Module:
    side = recipe.data.image_size or 0
    with torch.device("meta"):
        return build_model(recipe, num_classes=1000, in_chans=3, image_size=(side, side))


def names(model: nn.Module) -> list[str]:
    return [mixer.mixer_name for mixer in find_mixers(model).values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_one_the_name_says(name: str) -> None:
    count, mixed = MODELS[name]
    model = built(recipes.get(name))
    assert trainable(model) == count
    assert names(model).count("re_attention") == mixed
    assert set(names(model)[len(names(model)) - mixed :]) <= {"re_attention"}


@pytest.mark.slow
def test_every_command_of_the_ablations_is_its_row() -> None:
    typed = commands("deepvit_imagenet")
    assert set(typed) == {"deepvit-24b", *COMMANDS}
    models = {out: built(as_typed(typed[out])) for out in COMMANDS}
    for out, (count, mixed, shared) in COMMANDS.items():
        model = models[out]
        assert trainable(model) == count, out
        assert names(model).count("re_attention") == mixed, out
        assert names(model).count("shared_map") == shared, out
    unlike, code = (as_typed(typed[out]) for out in ("unlike", "as-the-code"))
    assert (unlike.loss.similarity, unlike.loss.similarity_blocks) == (0.1, 8)
    assert (code.schedule.epochs, code.schedule.cooldown_epochs, code.ema) == (310, 10, 0.99996)
    cold = [*find_mixers(models["decayed"]).values()]
    assert [32**-0.5 / cold[i].gain() for i in (0, 31)] == pytest.approx([1.0, 0.5])
    assert {m.attn_drop_p for m in find_mixers(models["dropped"]).values()} == {0.1}


def test_the_ablations_have_the_papers_settings() -> None:
    recipe = recipes.get("deepvit_imagenet")
    assert (recipe.optim.name, recipe.optim.lr) == ("adamw", 5e-4)
    schedule = recipe.schedule
    assert (schedule.name, schedule.epochs, schedule.warmup_epochs) == ("cosine", 300, 3)
    assert (recipe.data.batch_size * recipe.optim.accumulate, recipe.data.image_size) == (256, 224)
    assert recipe.loss.mixup > 0
    assert recipe.augment.auto_augment
    assert (recipe.loss.cutmix, recipe.loss.label_smoothing, recipe.augment.erasing) == (0, 0, 0)
    assert (recipe.model.drop_path, recipe.ema, recipe.loss.similarity) == (0, 0, 0)


def test_deits_recipe_has_deits_settings() -> None:
    recipe = recipes.get("deepvit_deit")
    batch = recipe.data.batch_size * recipe.optim.accumulate
    assert (batch, recipe.optim.lr) == (1024, 5e-4 * 1024 / 512)
    assert (recipe.schedule.epochs, recipe.schedule.warmup_epochs) == (300, 5)
    loss, augment = recipe.loss, recipe.augment
    assert (loss.mixup, loss.cutmix, loss.label_smoothing) == (0.8, 1.0, 0.1)
    assert (augment.auto_augment, augment.erasing) == ("rand-m9-mstd0.5-inc1", 0.25)
    assert (augment.erasing_fill, recipe.model.drop_path) == ("noise", 0.1)
    large = as_typed(commands("deepvit_deit")["deepvit-l"])
    assert trainable(built(large)) == 58_883_708


def test_fine_tuning_goes_on_from_deits_run(tmp_path: Path) -> None:
    recipe = recipes.get("deepvit_384")
    typed = commands("deepvit_384")
    assert as_typed(typed["deepvit-l"]).model.name == recipe.model.name == "deepvit_l_420"
    assert as_typed(typed["deepvit-l-384"]).model.weights == "deepvit-l"
    batch = recipe.data.batch_size * recipe.optim.accumulate
    assert (batch, recipe.optim.lr, recipe.optim.weight_decay) == (512, 5e-6, 1e-8)
    assert recipe.schedule.min_lr == recipe.optim.lr, "constant after the warm-up"
    assert recipe.loss == recipes.get("deepvit_deit").loss
    with pytest.raises(UserError, match=r"--model\.weights"):
        train(replace_path(recipe, {"data.spec": "digits", "data.image_size": 32}), tmp_path / "r")


@pytest.mark.slow
def test_the_curves_points_are_the_depths() -> None:
    text = recipes.notebook("deepvit_depth")
    assert re.findall(r"for depth in ([\d ]+); do", text) == [
        "16 24 32",
        "12 16 24 32",
        "4 8 16 24",
    ]
    for form, mixer in (("vit_16b", "softmax"), ("deepvit_16b", "re_attention")):
        point = replace_path(recipes.get("deepvit_depth"), {"model.name": form})
        assert names(built(point)) == [mixer] * 16
    small = replace_path(
        recipes.get("small_images_vit"),
        {"model.name": "deepvit_micro_p4_32", "model.options.depth": 24},
    )
    with torch.device("meta"):
        deep = build_model(small, num_classes=10, in_chans=3, image_size=(32, 32))
    assert names(deep) == ["softmax"] * 20 + ["re_attention"] * 4
