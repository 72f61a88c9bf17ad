# SPDX-License-Identifier: Apache-2.0
"""A loss that is not finite: step, learning rate and images are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.train import ranks
from keymix.train.engine import train
from keymix.train.nonfinite import Losses, Step
from keymix.train.recipe import Recipe

Vary = Callable[[dict[str, Any]], Recipe]


def step(each: list[float], *, number: int = 3) -> Step:
    values = torch.tensor(each)
    return Step(
        epoch=1,
        step=number,
        rate=0.25,
        loss=values.mean(),
        each=lambda: values,
        index=torch.arange(len(each)) + 10,
    )


@pytest.fixture
def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for i, parameter in enumerate(made.parameters()):
        parameter.grad = torch.full_like(parameter, float(i))
    return made


@pytest.fixture
def losses(model: nn.Module, tmp_path: Path) -> Losses:
    return Losses(model, lambda i: f"image {i}", tmp_path, late=False)


def test_broken_image_is_named_among_the_batch(losses: Losses, tmp_path: Path) -> None:
    losses.take(step([1.0, 2.0]))
    with pytest.raises(UserError) as stopped:
        losses.take(step([1.0, math.nan, 2.0, math.inf]))
    line = str(stopped.value)
    assert "became nan in step 4 of epoch 2, at learning rate 0.25" in line
    assert "2 of the batch's 4 images: image 11, image 13 (" in line
    report = json.loads((tmp_path / "nonfinite.json").read_text())
    assert (report["epoch"], report["step"], report["learning_rate"]) == (1, 3, 0.25)
    assert [entry["image"] for entry in report["images"]] == [f"image {i}" for i in range(10, 14)]
    assert [float(entry["loss"]) for entry in report["images"]][::2] == [1.0, 2.0]


def test_many_images_are_counted(losses: Losses) -> None:
    with pytest.raises(
        UserError, match=r"20 of the batch's 20 images: image 10, .*image 17 and 12"
    ):
        losses.take(step([math.nan] * 20))


def clip(model: nn.Module) -> Tensor:
    norm = ranks.norm(model.parameters())
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    return norm


def test_late_look_finds_the_step(model: nn.Module, tmp_path: Path) -> None:
    losses = Losses(model, lambda i: f"image {i}", tmp_path, late=True)
    losses.take(step([1.0], number=0))
    losses.take(step([1.0, math.nan], number=1))
    break_a_gradient(model)
    losses.before_update(clip(model))
    losses.take(step([math.nan, math.nan], number=2))
    with pytest.raises(UserError) as stopped:
        losses.look()
    line = str(stopped.value)
    assert "in step 2 of epoch 2" in line
    assert "1 of the batch's 2 images: image 11" in line


def test_late_look_comes_every_fifty_steps(model: nn.Module, tmp_path: Path) -> None:
    losses = Losses(model, str, tmp_path, late=True)
    for number in range(49):
        losses.take(step([math.nan], number=number))
    with pytest.raises(UserError, match="step 1 of"):
        losses.take(step([1.0], number=49))


def break_a_gradient(model: nn.Module) -> None:
    weight = model[0].weight  # type: ignore[index]
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    weight.grad[0, 0] = math.nan


def test_gradient_that_is_not_finite_ends_a_run_of_finite_loss(
    losses: Losses, model: nn.Module
) -> None:
    losses.take(step([1.0]))
    break_a_gradient(model)
    losses.before_update(clip(model))
    with pytest.raises(UserError, match=r"gradient became .* by step 5 of epoch 2"):
        losses.take(step([1.0], number=4))


@pytest.mark.parametrize("late", [False, True])
def test_unclipped_gradients_are_looked_at_before_the_validation(
    model: nn.Module, tmp_path: Path, late: bool
) -> None:
    losses = Losses(model, str, tmp_path, late=late)
    losses.take(step([1.0]))
    break_a_gradient(model)
    losses.before_update(None)
    losses.before_clearing()
    model.zero_grad()
    with pytest.raises(UserError, match=r"gradient became .* by step 4 of epoch 2"):
        losses.look()


def test_unclipped_gradients_are_looked_at_every_fifty_updates(
    losses: Losses, model: nn.Module
) -> None:
    break_a_gradient(model)
    for number in range(50):
        losses.take(step([1.0], number=number))
        losses.before_update(None)
    with pytest.raises(UserError, match="by step 51 of"):
        losses.take(step([1.0], number=50))


def test_gradients_that_a_scaler_skips_are_no_reason_to_end(
    model: nn.Module, tmp_path: Path
) -> None:
    losses = Losses(model, str, tmp_path, late=True, scaled=True)
    losses.take(step([1.0]))
    break_a_gradient(model)
    losses.before_update(None)
    losses.take(step([1.0]))
    losses.look()
    assert losses.means() == {"loss": 1.0}


def test_spiking_run_that_lost_its_weights_ends(
    vary: Vary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN currents fire no spike, so the loss stays that of a guess."""
    from keymix.train import engine

    def lost(*args: Any, **options: Any) -> nn.Module:
        made = build(*args, **options)
        conv = next(part for part in made.modules() if isinstance(part, nn.Conv2d))
        nn.init.constant_(conv.weight, math.nan)
        return made

    build = engine.model_for
    monkeypatch.setattr(engine, "model_for", lost)
    small = {"embed_dim": 32, "num_heads": 1, "time_steps": 2}
    recipe = vary({"model.name": "qkformer_micro_32", "model.options": small})
    with pytest.raises(UserError, match=r"gradient .* while the loss stayed finite"):
        train(recipe, tmp_path / "run")


def test_mean_does_not_depend_on_when_it_was_saved(model: nn.Module, tmp_path: Path) -> None:
    values = torch.rand(20).tolist()
    whole, begun = (Losses(model, str, tmp_path, late=False) for _ in range(2))
    for value in values:
        whole.take(step([value]))
    for value in values[:7]:
        begun.take(step([value]))
    ended = Losses(model, str, tmp_path, late=False)
    ended.restore(begun.state())
    for value in values[7:]:
        ended.take(step([value]))
    assert ended.means() == whole.means()


@pytest.mark.gpu
def test_gpus_losses_are_looked_at_together(wild: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step \d of epoch 1, .* of .*16 of the batch's 16 images"):
        train(wild, tmp_path / "run")


def test_step_that_is_looked_at_later_holds_no_graph(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[bool] = []

    def take(losses: Losses, step: Step) -> None:
        assert isinstance(step.each, partial)
        kept = [*step.each.args, step.loss, step.each()]
        graphs.extend(t.requires_grad for t in kept if isinstance(t, torch.Tensor))

    monkeypatch.setattr(Losses, "take", take)
    train(tiny, tmp_path / "run")
    assert graphs
    assert not any(graphs)
