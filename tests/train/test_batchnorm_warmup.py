# SPDX-License-Identifier: Apache-2.0
"""Running statistics of fresh spiking models: the mean of what the first batches had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keymix.models import create_model
from keymix.train import files
from keymix.train.batchnorm_warmup import BatchNormWarmup
from keymix.train.engine import train
from keymix.train.recipe import Recipe

Vary = Callable[[dict[str, Any]], Recipe]


def spiking() -> nn.Module:
    torch.manual_seed(0)
    small: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "time_steps": 2}
    return create_model("qkformer_micro_32", num_classes=3, **small).train()


def first_norm(model: nn.Module) -> tuple[str, nn.BatchNorm2d]:
    return next((n, m) for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))


def expected(batches: list[torch.Tensor], start: float, momentum: float = 0.1) -> torch.Tensor:
    value = torch.full_like(batches[0], start)
    for n, batch in enumerate(batches, 1):
        value = value + max(momentum, 1 / n) * (batch - value)
    return value


def test_statistics_are_means_until_the_momentum_takes_over() -> None:
    model = spiking()
    name, norm = first_norm(model)
    conv = model.get_submodule(name.rpartition(".")[0]).conv
    warmup = BatchNormWarmup(model)
    means, variances = [], []
    for step in range(14):
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            y = conv(images).double().transpose(0, 1).flatten(1)
        means.append(y.mean(1))
        variances.append(y.var(1))
        with warmup.averaging():
            loss = model(images).square().sum()
        loss.backward()  # statistics changed since the forward pass must not disturb it
        torch.testing.assert_close(
            norm.running_mean.double(), expected(means, 0), rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(
            norm.running_var.double(), expected(variances, 1), rtol=1e-4, atol=0
        )
        assert int(norm.num_batches_tracked) == step + 1


def test_count_of_a_resumed_model_goes_on() -> None:
    images = torch.randn(2, 3, 32, 32)
    whole, begun, resumed = (spiking() for _ in range(3))
    warmup = BatchNormWarmup(whole)
    for _ in range(4):
        with warmup.averaging():
            whole(images)
    warmup = BatchNormWarmup(begun)
    for _ in range(2):
        with warmup.averaging():
            begun(images)
    warmup = BatchNormWarmup(resumed)  # before the state is there, as in a resumed run
    resumed.load_state_dict(begun.state_dict())
    for _ in range(2):
        with warmup.averaging():
            resumed(images)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_frozen_norms_and_other_models_are_left_alone() -> None:
    images = torch.randn(2, 3, 32, 32)
    model = spiking()
    norm = first_norm(model)[1].eval()
    before = [norm.running_mean.clone(), norm.running_var.clone()]
    with BatchNormWarmup(model).averaging():
        model(images)
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])

    dense = nn.Sequential(nn.BatchNorm2d(3)).train()
    with BatchNormWarmup(dense).averaging():
        dense(images)
    torch.testing.assert_close(dense[0].running_mean, 0.1 * images.mean((0, 2, 3)))


@pytest.mark.slow
def test_short_training_answers_differently_in_evaluation(vary: Vary, tmp_path: Path) -> None:
    small = {"embed_dim": 32, "num_heads": 1, "time_steps": 2}
    recipe = vary({"model.name": "qkformer_micro_32", "model.options": small})
    run = train(recipe, tmp_path / "run")
    answers = np.load(run.folder / files.PREDICTIONS)["last_pred"]
    assert len(set(answers.tolist())) > 1
