# SPDX-License-Identifier: Apache-2.0
"""A run computes what a bare PyTorch loop computes that is written from the recipe's words."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.data.augment import Augment
from keymix.data.dataset import ImageData
from keymix.data.loaders import Loader
from keymix.train import files
from keymix.train.engine import train
from keymix.train.model import build_model, load_data
from keymix.train.recipe import Recipe

Vary = Callable[[dict[str, Any]], Recipe]

# everything a step does apart from random numbers; 5 batches per epoch leave an update of one batch
SETTINGS: dict[str, Any] = {
    "augment.crop_padding": 0,
    "model.drop_rate": 0.0,
    "optim.name": "sgd",
    "optim.lr": 0.1,
    "optim.weight_decay": 0.0,
    "optim.clip_grad": 0.5,
    "optim.accumulate": 2,
    "schedule.epochs": 3,
    "schedule.warmup_epochs": 0,
    "schedule.min_lr": 0.01,
    "loss.label_smoothing": 0.2,
    "ema": 0.9,
}


def bare(recipe: Recipe, data: ImageData) -> tuple[nn.Module, dict[str, Tensor], list[float]]:
    """Train by a loop over batches; return the model, its average and the losses of the epochs."""
    sizes: dict[str, Any] = {"in_chans": data.in_chans, "image_size": data.image_size}
    model = build_model(recipe, num_classes=len(data.classes), **sizes)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    batches = Loader(
        data.train, data, batch_size=recipe.data.batch_size, train=True, seed=recipe.seed
    )
    optim, schedule = recipe.optim, recipe.schedule
    per_epoch = math.ceil(len(batches) / optim.accumulate)
    total, update = schedule.epochs * per_epoch, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=optim.lr, momentum=0.9, nesterov=True)
    means = []
    for epoch in range(schedule.epochs):
        batches.set_epoch(epoch)
        losses = []
        for step, batch in enumerate(batches, start=1):
            smoothing = recipe.loss.label_smoothing
            loss = F.cross_entropy(model(batch.images), batch.targets, label_smoothing=smoothing)
            losses.append(loss.item())
            (loss / optim.accumulate).backward()
            if step % optim.accumulate and step < len(batches):
                continue
            nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
            half_turn = (1 + math.cos(math.pi * update / total)) / 2
            rate = schedule.min_lr + (optim.lr - schedule.min_lr) * half_turn
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            decay = min(recipe.ema, 1 - (1 + update) ** (-2 / 3))
            for name, value in model.state_dict().items():
                average[name] = decay * average[name] + (1 - decay) * value
            update += 1
        means.append(math.fsum(losses) / len(losses))
    return model, average, means


@pytest.fixture(scope="module")
def data(tiny_recipe: Recipe) -> ImageData:
    return load_data(tiny_recipe.data)


@pytest.mark.parametrize("ema", [0.9, 0.0], ids=["averaged", "plain"])
def test_weights_and_losses_are_those_of_a_bare_loop(
    vary: Vary, data: ImageData, tmp_path: Path, ema: float
) -> None:
    recipe = vary(SETTINGS | {"ema": ema})
    assert recipe.augment == Augment()
    run = train(recipe, tmp_path / "run", data=data)
    model, average, means = bare(recipe, data)
    kept, _ = files.read_weights(run.folder / files.weights_file("last"))
    expected = average if ema else model.state_dict()
    torch.testing.assert_close(kept, dict(expected), rtol=1e-4, atol=1e-5)
    assert [line["train_loss"] for line in run.metrics()] == pytest.approx(means, rel=1e-5)
