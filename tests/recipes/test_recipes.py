# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fnmatch
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from each import together
from keymix import recipes
from keymix.errors import UserError
from keymix.models.match import trainable
from keymix.tasks.classification.training import ClassificationTask
from keymix.train.model import build_model
from keymix.train.nonfinite import Losses
from keymix.train.recipe import replace_path
from keymix.train.step import make_optimizer
from shrunk import answer, arguments, images

SPT = 9_622_512  # the authors' ViT-S; with 100 classes the paper prints the same 9.6 M
PARAMETERS = {
    "vit_small_cifar10": SPT,
    "vit_small_cifar100": SPT,
    "vit_small_svhn": SPT,
    "vit_small_fashion_mnist": SPT,
    "vit_cifar10_kentaro": 9_523_722,
}
PAPERS = {  # published settings of the small sets: data, RandAugment, model
    "vit_small_cifar10": ("cifar10", (2, 9), "vit_small_spt_p4_32"),
    "vit_small_cifar100": ("cifar100", (2, 9), "vit_small_spt_p4_32"),
    "vit_small_svhn": ("svhn", (2, 9), "vit_small_spt_p4_32"),
    "vit_small_fashion_mnist": ("fashion_mnist", (2, 9), "vit_small_spt_p4_32"),
    "vit_cifar10_kentaro": ("cifar10", (2, 14), "vit_small_p4_32"),
}


def test_folder_is_the_list() -> None:
    """Whatever a file of the folder marks as a recipe is found, under its function's name."""
    folder = Path(recipes.__file__).parent
    source = "".join(file.read_text() for file in folder.glob("*.py"))
    marked = re.findall(r"^@recipe\ndef (\w+)\(", source, re.MULTILINE)
    tabled = {f"setr_{m}_uwgi" for m in ("kv", "kv_pos", "kv_ce", "kv_cvt", "qkv_ce", "qkv_cvt")}
    tabled |= {"mask_rcnn_3x", "cascade_mask_rcnn_1x", "cascade_mask_rcnn_3x"}
    assert recipes.names() == sorted({*marked, *tabled})
    assert {"digits_vit", "small_images_vit", "vit_small_cifar10"} <= {*marked}


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="digits_vit"):
        recipes.get("digit_vit")


@pytest.mark.parametrize("name", recipes.names())
def test_recipe_is_named_like_its_function_and_survives_json(name: str, tmp_path: Path) -> None:
    import json

    recipe = recipes.get(name)
    assert recipe.name == name
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    assert recipes.resolve(str(tmp_path)) == recipe
    assert recipes.resolve(str(tmp_path / "recipe.json")) == recipe


@together
@pytest.mark.parametrize("name", recipes.names())
def test_docstring_is_a_lab_notebook(name: str) -> None:
    text = recipes.notebook(name)
    assert f"keymix train {name}" in text
    assert "Paper:" in text
    assert "Measured:" in text
    assert recipes.summary(name) == text.splitlines()[0]


@together
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_model_is_the_one_the_recipe_names(name: str) -> None:
    with torch.device("meta"):
        model = build_model(recipes.get(name), num_classes=10, in_chans=3, image_size=(32, 32))
    assert trainable(model) == PARAMETERS[name]


DETECTORS = fnmatch.filter(recipes.names(), "*mask_rcnn*")  # tests/tasks has the steps of these


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*recipes.names()} - {*DETECTORS}))
def test_recipe_builds_and_takes_a_step(name: str, tmp_path: Path) -> None:
    """The recipe's loss and optimiser on its model made small."""
    recipe = recipes.get(name)
    config = recipe.model
    small = arguments(config.name)
    small.pop("img_size", None)  # the images say it
    x = images(config.name, count=4)
    config = replace(config, options={**config.options, **small}, weights=None)
    recipe = replace(recipe, model=config)
    side = (x.shape[2], x.shape[3])
    model = build_model(recipe, num_classes=10, in_chans=x.shape[1], image_size=side).train()
    losses = Losses(model, str, tmp_path, late=False)
    task = ClassificationTask(recipe, model, num_classes=10, steps_per_epoch=1, losses=losses)
    optimizer = make_optimizer(task.recipe.optim, task.model)
    assert type(optimizer).__name__.lower() == recipe.optim.name
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    smoothing = recipe.loss.label_smoothing
    for group in optimizer.param_groups:  # the warm-up's first rate moves too little to see
        group["lr"] = 1e-2
    pixels = answer(config.name, 1)[2:]  # none where an image has one class
    targets = torch.arange(4).view(-1, *[1] * len(pixels)).expand(4, *pixels)
    for _ in range(2):  # behind a classifier that starts at zero only the second reaches all
        loss = nn.functional.cross_entropy(model(x), targets, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
    moved = [k for k, p in model.named_parameters() if not torch.equal(p, before[k])]
    assert any(".mixer." in k for k in moved)
    assert len(moved) > 0.9 * len(before)


@together
@pytest.mark.parametrize("name", PAPERS)
def test_small_data_recipe_has_the_published_settings(name: str) -> None:
    recipe = recipes.get(name)
    spec, strength, model = PAPERS[name]
    assert (recipe.data.spec, recipe.model.name) == (spec, model)
    assert recipe.augment.rand_augment == strength
    assert recipe.augment.rand_augment_first
    assert (recipe.augment.crop_padding, recipe.augment.flip) == (4, True)
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.weight_decay) == ("adam", 1e-4, 0.0)
    assert (recipe.schedule.name, recipe.schedule.epochs) == ("cosine", 200)
    assert recipe.schedule.warmup_epochs == 0
    assert recipe.data.batch_size == 512
    assert recipe.loss.mixup == recipe.loss.cutmix == recipe.loss.label_smoothing == recipe.ema == 0


@pytest.mark.slow
def test_small_images_learn_on_real_cifar(real_data: Path, tmp_path: Path) -> None:
    from keymix.train.engine import train

    recipe = replace_path(
        recipes.get("small_images_vit"),
        {
            "data.spec": f"parquet:{real_data / 'cifar10'}",
            "data.limit": 1000,
            "model.options.depth": 2,
            "schedule.epochs": 2,
        },
    )
    run = train(recipe, tmp_path / "run")
    losses = [line["train_loss"] for line in run.metrics()]
    assert losses[1] < losses[0] < 2.5
    assert run.summary.last.test.scores["top1"] > 0.15
