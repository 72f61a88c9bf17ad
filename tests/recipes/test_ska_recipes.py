# SPDX-License-Identifier: Apache-2.0
"""The static-key paper's recipes: published settings, the model each name says, a step."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from each import together
from keymix import recipes
from keymix.compare.models import choose_mixers, meta_builder
from keymix.data import load
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models.match import trainable
from keymix.train.engine import train
from keymix.train.model import build_model
from keymix.train.recipe import Recipe, replace_path

# parameters at the recipe's own image size and classes; mixers a stage or block
MODELS = {
    "cskaformer_s18_imagenet": (28_973_778, "sep_conv conv_static_key softmax softmax"),
    "skaformer_s18_imagenet": (26_555_922, "sep_conv static_key softmax softmax"),
    "cskaformer_b36_imagenet": (119_417_398, "sep_conv conv_static_key softmax softmax"),
    "skaformer_b36_imagenet": (100_074_550, "sep_conv static_key softmax softmax"),
    "ska_ablation_placement": (28_973_778, "sep_conv conv_static_key softmax softmax"),
    "ska_ablation_heads": (28_973_778, "sep_conv conv_static_key softmax softmax"),
    "ska_ablation_activation": (28_973_778, "sep_conv conv_static_key softmax softmax"),
    "cait_small_cifar10": (12_685_322, "softmax"),
    "swin_tiny_cifar10": (26_598_646, "softmax"),
    "cvt_13_cifar10": (19_616_330, "softmax"),
}
# three layers of 4 heads with 28^2 keys become three with 48^2: 288 weights per key and head, bias
AT_384 = 28_973_778 + 3 * 4 * (48**2 - 28**2) * (288 + 1)
TABLE_5 = {  # SKA Table 5, placements of S18
    "sep_conv/sep_conv/softmax/softmax": 26_341_656,
    "sep_conv/static_key/softmax/softmax": 26_555_922,
    "sep_conv/sep_conv/static_key/softmax": 25_984_536,
    "sep_conv/sep_conv/softmax/static_key": 25_630_488,
    "sep_conv/conv_static_key/softmax/softmax": 28_973_778,
    "sep_conv/sep_conv/conv_static_key/softmax": 30_518_016,
    "sep_conv/sep_conv/softmax/conv_static_key": 26_234_952,
}


def built(recipe: Recipe) -> nn.Module:
    side = recipe.data.image_size or 0
    classes = 1000 if recipe.data.spec == "imagenet:" else 10
    with torch.device("meta"):
        return build_model(recipe, num_classes=classes, in_chans=3, image_size=(side, side))


def mixers_of(model: nn.Module) -> list[str]:
    """The mixers in order, repetitions left out."""
    names = [mixer.mixer_name for mixer in find_mixers(model).values()]
    return [n for i, n in enumerate(names) if i == 0 or n != names[i - 1]]


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_one_the_name_says(name: str) -> None:
    count, mixers = MODELS[name]
    model = built(recipes.get(name))
    assert trainable(model) == count
    wanted = mixers.split()
    assert mixers_of(model) == [m for i, m in enumerate(wanted) if i == 0 or m != wanted[i - 1]]


@together
@pytest.mark.parametrize("name", [n for n in MODELS if "imagenet" in n or "ablation" in n])
def test_imagenet_recipes_have_the_published_settings(name: str) -> None:
    recipe = recipes.get(name)
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.weight_decay) == ("lamb", 8e-3, 0.05)
    assert recipe.data.batch_size * recipe.optim.accumulate == 4096
    schedule = recipe.schedule
    assert (schedule.name, schedule.warmup_epochs, schedule.cooldown_epochs) == ("cosine", 20, 10)
    assert (schedule.warmup_lr, schedule.min_lr) == (1e-6, 1e-5)
    fewer = name in ("ska_ablation_placement", "ska_ablation_heads")
    assert schedule.epochs == (160 if fewer else 310)
    assert recipe.augment.auto_augment == "rand-m9-mstd0.5-inc1"
    assert (recipe.augment.erasing, recipe.augment.erasing_fill) == (0.25, "noise")
    loss = recipe.loss
    assert (loss.mixup, loss.cutmix, loss.label_smoothing) == (0.8, 1.0, 0.1)
    large = "b36" in name
    assert (recipe.model.drop_path, recipe.model.drop_rate) == ((0.6, 0.5) if large else (0.15, 0))
    assert recipe.data.image_size == 224


@pytest.mark.slow
def test_every_command_of_an_ablation_reads_and_is_its_row() -> None:
    data = load("digits", limit=50)
    for name in ("ska_ablation_placement", "ska_ablation_heads", "ska_ablation_activation"):
        notebook = recipes.notebook(name)
        text = re.search(r'--mixers "([^"]+)"', notebook)
        assert text is not None
        specs = choose_mixers(text[1].replace("\\\n", ""), controls=False)
        recipe = recipes.get(name)
        photo = replace(data, image_size=(224, 224), in_chans=3, classes=("x",) * 1000)
        build = meta_builder(recipe, photo)
        counts = {spec.label: trainable(build(spec)) for spec in specs}
        if name == "ska_ablation_placement":
            assert counts == TABLE_5
        elif name == "ska_ablation_heads":  # a bias a key and head, 3 blocks of 28 x 28 keys
            more = [n - min(counts.values()) for n in counts.values()]
            assert more == [(heads - 1) * 3 * 28 * 28 for heads in (1, 2, 4, 8, 16)]
        else:
            assert len(counts) == 5
        baseline = re.search(r"--baseline (\S+)", notebook)
        if baseline is not None:
            assert choose_mixers(baseline[1], controls=True)[0].label in counts


def test_fine_tuning_at_384_starts_from_a_run_and_resamples_its_keys(tmp_path: Path) -> None:
    recipe = recipes.get("cskaformer_s18_384")
    assert trainable(built(recipe)) == AT_384
    assert (recipe.optim.name, recipe.optim.lr) == ("lamb", 1e-4)
    assert (recipe.schedule.name, recipe.schedule.epochs) == ("constant", 30)
    assert (recipe.ema, recipe.loss.mixup, recipe.loss.cutmix) == (0.9999, 0, 0)
    assert recipe.data.batch_size * recipe.optim.accumulate == 1024
    ready = replace_path(recipe, {"data.spec": "digits", "data.image_size": None})
    with pytest.raises(UserError, match=r"--model\.weights"):
        train(ready, tmp_path / "run")
    gone = replace_path(ready, {"model.weights": str(tmp_path / "gone.safetensors")})
    with pytest.raises(UserError, match=r"gone\.safetensors"):
        train(gone, tmp_path / "run")


def test_a_run_goes_on_from_another_at_another_size(tmp_path: Path) -> None:
    """In small: 12 pixels, then 16; keys and positions come from the first run, resampled."""
    first = replace_path(
        recipes.get("digits_vit"),
        {"data.limit": 60, "schedule.epochs": 1, "model.mixer": "ska", "model.options.depth": 1},
    )
    run = train(first, tmp_path / "at12")
    second = replace_path(first, {"data.image_size": 16, "model.weights": str(tmp_path / "at12")})
    still = {"optim.lr": 1e-6, "schedule.min_lr": 0.0, "optim.weight_decay": 0.0}
    second = replace_path(second, {**still, "seed": 1})
    finer = train(second, tmp_path / "at16")
    before, after = run.weights()[0], finer.weights()[0]
    key = "blocks.0.attn.mixer.key"
    assert (before[key].shape[1], after[key].shape[1]) == (9, 16)
    smaller = torch.nn.functional.interpolate(
        before[key].mT.unflatten(-1, (3, 3)), (4, 4), mode="bicubic", antialias=True
    )
    assert torch.allclose(after[key].mT.unflatten(-1, (4, 4)), smaller, atol=1e-4)
    kept = "blocks.0.mlp.fc1.weight"
    assert torch.allclose(after[kept], before[kept], atol=1e-6)
