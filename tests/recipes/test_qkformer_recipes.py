# SPDX-License-Identifier: Apache-2.0
"""QKFormer's recipes: published settings, effective batches, and the commands of the notebooks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from notebooks import as_typed, commands
from torch import nn

from keymix import recipes
from keymix.hosts import find_mixers
from keymix.models.match import trainable
from keymix.train.model import build_model
from keymix.train.recipe import Recipe

NAMES = ("qkformer_cifar10", "qkformer_imagenet", "qkformer_cifar10dvs", "qkformer_dvs128")
# what the command of a notebook builds: classes, parameters, time steps
BUILT: dict[str, dict[str, tuple[int, int, int]]] = {
    "qkformer_cifar10": {
        "hst": (10, 6_706_234, 4),
        "hst-100": (100, 6_740_884, 4),
        "t1": (100, 6_740_884, 1),
        "t2": (100, 6_740_884, 2),
        "t6": (100, 6_740_884, 6),
        "if": (100, 6_740_884, 4),
        "plif": (100, 6_740_884 + 35, 4),
        "qkca-ssa": (100, 6_740_884, 4),
        "qkta-qkca": (100, 6_444_436, 4),
        "sps": (100, 9_359_380, 4),
        "peds": (100, 9_789_652, 4),
    },
    "qkformer_imagenet": {
        "hst-384": (1000, 16_473_688, 4),
        "hst-512": (1000, 29_079_336, 4),
        "hst-768": (1000, 64_962_760, 4),
        "t1": (1000, 64_962_760, 1),
        "at-384": (1000, 64_962_760, 4),
    },
    "qkformer_cifar10dvs": {
        "hst": (10, 1_504_138, 16),
        "hst-t10": (10, 1_504_138, 10),
        "sps": (10, 2_566_666, 16),
        "peds": (10, 2_608_650, 16),
    },
    "qkformer_dvs128": {
        "hst": (11, 1_504_395, 16),
        "hst-t10": (11, 1_504_395, 10),
        "if": (11, 1_504_395, 16),
        "plif": (11, 1_504_395 + 21, 16),
    },
}


def built(recipe: Recipe, classes: int) -> nn.Module:
    events = recipe.data.time_steps is not None
    side = recipe.data.image_size or (128 if events else 32)
    with torch.device("meta"):
        return build_model(
            recipe,
            num_classes=classes,
            in_chans=2 if events else 3,
            image_size=(side, side),
            time_steps=recipe.data.time_steps,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_notebook_builds_its_row(name: str) -> None:
    typed = commands(name)
    assert typed.keys() == BUILT[name].keys()
    for out, (classes, params, steps) in BUILT[name].items():
        model: Any = built(as_typed(typed[out]), classes)
        assert (trainable(model), model.time_steps) == (params, steps), out
    kinds = {
        out: "/".join(dict.fromkeys(m.mixer_name for m in find_mixers(model).values()))
        for out in BUILT[name]
        for model in [built(as_typed(typed[out]), 10)]
    }
    for out, mixers in kinds.items():
        wanted = {"qkca-ssa": "qk_channel/spiking_self", "qkta-qkca": "qk_token/qk_channel"}
        own = "spiking_self" if out in ("sps", "peds") else "qk_token/spiking_self"
        assert mixers == wanted.get(out, own)


@pytest.mark.parametrize("name", NAMES)
def test_the_effective_batch_is_that_of_the_notebook(name: str) -> None:
    recipe = recipes.get(name)
    factors = (recipe.data.batch_size, 1, recipe.optim.accumulate)
    update = factors[0] * factors[2]
    text = re.sub(r" (images|device|steps)", "", " ".join(recipes.notebook(name).split()))
    assert f"{factors[0]} x 1 x {factors[2]} = {update} per update" in text
    if name == "qkformer_imagenet":
        assert update == 512
        assert recipe.optim.lr == pytest.approx(6e-4 * update / 256)


@pytest.mark.parametrize(
    ("name", "epochs", "cooldown", "warmup", "lr", "decay", "drop_path"),
    [
        ("qkformer_cifar10", 410, 10, 20, (1e-5, 1e-3, 1e-5), 0.06, 0.2),
        ("qkformer_imagenet", 200, 0, 5, (1e-6, 1.2e-3, 1e-6), 0.05, 0.1),
        ("qkformer_cifar10dvs", 106, 10, 10, (1e-5, 5e-3, 1e-5), 0.06, 0.1),
        ("qkformer_dvs128", 202, 10, 10, (1e-5, 1e-3, 2e-5), 0.06, 0.1),
    ],
)
def test_settings_are_the_published(
    name: str,
    epochs: int,
    cooldown: int,
    warmup: int,
    lr: tuple[float, float, float],
    decay: float,
    drop_path: float,
) -> None:
    recipe = recipes.get(name)
    schedule, optim = recipe.schedule, recipe.optim
    assert (schedule.epochs, schedule.cooldown_epochs) == (epochs, cooldown)
    assert (schedule.warmup_epochs, schedule.name, optim.name) == (warmup, "cosine", "adamw")
    assert (schedule.warmup_lr, optim.lr, schedule.min_lr) == lr
    assert (optim.weight_decay, recipe.model.drop_path) == (decay, drop_path)
    loss = recipe.loss
    mixing = (loss.mixup, loss.cutmix, loss.mixup_prob, loss.mixup_off_epoch)
    wanted = {"qkformer_cifar10": (0.5, 0, 1, 200), "qkformer_imagenet": (0, 0, 1, None)}
    assert mixing == wanted.get(name, (0.5, 0, 0.5, 75))
    assert loss.label_smoothing == 0.1
