# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keymix.errors import UserError
from keymix.tasks.classification.answers import Scores
from keymix.tasks.classification.training import ClassificationTask
from keymix.train.model import build_model
from keymix.train.nonfinite import Losses
from keymix.train.recipe import OptimConfig, Recipe
from keymix.train.step import make_optimizer, make_schedule
from keymix.train.task import step_seed
from keymix.train.validate import check_recipe

Vary = Callable[[dict[str, Any]], Recipe]


def _model(recipe: Recipe) -> nn.Module:
    return build_model(recipe, num_classes=10, in_chans=1, image_size=(12, 12))


def test_step_seeds_differ_in_every_argument() -> None:
    seeds = {
        step_seed(s, e, i, r) for s in range(3) for e in range(3) for i in range(9) for r in (0, 1)
    }
    assert len(seeds) == 3 * 3 * 9 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)


def test_backbone_weights_are_equal_across_mixers_at_a_seed(vary: Vary) -> None:
    one = _model(vary({"model.mixer": "softmax"})).state_dict()
    other = _model(vary({"model.mixer": "static_key"})).state_dict()
    shared = [name for name in one if ".attn." not in name]
    assert shared
    assert all(torch.equal(one[name], other[name]) for name in shared)
    elsewhere = _model(vary({"seed": 1})).state_dict()
    assert not torch.equal(one["patch_embed.proj.weight"], elsewhere["patch_embed.proj.weight"])


def test_what_the_model_names_is_not_decayed(vary: Vary) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free = nn.Parameter(torch.ones(3, 3))
            self.layer = nn.Linear(3, 3)

        def no_weight_decay(self) -> set[str]:
            return {"free"}

    model = Model()
    optimizer = make_optimizer(OptimConfig(weight_decay=0.1), model)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {id(model.layer.weight)}


def test_unknown_optimiser_names_the_nearest() -> None:
    with pytest.raises(UserError, match="adamw"):
        make_optimizer(OptimConfig(name="adamww"), nn.Linear(2, 2))


def test_betas_where_there_are_none_are_refused() -> None:
    with pytest.raises(UserError, match="betas"):
        make_optimizer(OptimConfig(name="rmsprop", betas=(0.9, 0.99)), nn.Linear(2, 2))


def test_scores_agree_with_counting() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 8, generator=generator)
    targets = torch.randint(8, (50,), generator=generator)
    scores = Scores(8)
    scores.update(logits[:30], targets[:30])
    scores.update(logits[30:], targets[30:])
    values = scores.metrics()
    assert values["top1"] == (logits.argmax(1) == targets).sum().item() / 50  # to the last digit
    assert values["top5"] == (logits.topk(5).indices == targets[:, None]).any(1).sum().item() / 50
    loss = nn.functional.cross_entropy(logits, targets).item()
    assert values["loss"] == pytest.approx(loss, rel=1e-5)


def test_top5_of_five_classes_is_not_reported() -> None:
    scores = Scores(5)
    scores.update(torch.eye(5), torch.arange(5))
    assert scores.metrics()["top5"] is None


def test_average_follows_floats_and_copies_counters(vary: Vary, tmp_path: Path) -> None:
    recipe = vary({"ema": 0.9})
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    losses = Losses(model, str, tmp_path, late=False)
    task = ClassificationTask(recipe, model, num_classes=2, steps_per_epoch=1, losses=losses)
    start = model[0].weight.detach().clone()
    assert task.ema is not None
    with torch.no_grad():
        model[0].weight.add_(1.0)
        model[1].num_batches_tracked.fill_(7)
    task.ema.update(model, step=10_000)
    averaged = task.evaluated
    assert isinstance(averaged, nn.Sequential)
    assert torch.allclose(averaged[0].weight, start + 0.1)
    assert int(averaged[1].num_batches_tracked) == 7
    assert not any(p.requires_grad for p in averaged.parameters())


def test_layers_before_the_head_learn_more_slowly(vary: Vary) -> None:
    recipe = vary({"optim.layer_decay": 0.5, "schedule.warmup_epochs": 0})
    model = _model(recipe)
    optimizer = make_optimizer(recipe.optim, model)
    make_schedule(recipe, optimizer, 4)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: rates[id(p)] / recipe.optim.lr for name, p in model.named_parameters()}
    depth = recipe.model.options["depth"]
    assert named["head.weight"] == 1
    blocks = [named[f"blocks.{number}.mlp.fc1.weight"] for number in range(depth)]
    assert blocks == [pytest.approx(0.5 ** (depth - number)) for number in range(depth)]
    with pytest.raises(UserError, match=r"^optim\.layer_decay = 0\.5"):
        check_recipe(vary({"optim.layer_decay": 0.5, "schedule.name": "none"}))


def test_the_cooldown_is_the_end_of_the_epochs(vary: Vary) -> None:
    recipe = vary(
        {"schedule.epochs": 10, "schedule.cooldown_epochs": 3, "schedule.min_lr": 1e-5},
    )
    model = _model(recipe)
    scheduler = make_schedule(recipe, make_optimizer(recipe.optim, model), 4)
    assert scheduler is not None
    rates = []
    for update in range(40):
        scheduler.step_update(update)
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    assert rates[27] > 1e-5
    assert rates[28:] == [1e-5] * 12


@pytest.mark.parametrize(("options", "power"), [({}, 0.9), ({"schedule.power": 2.0}, 2.0)])
def test_poly_falls_with_its_power(options: dict[str, float], power: float, vary: Vary) -> None:
    recipe = vary(
        {"schedule.name": "poly", "schedule.epochs": 5, "schedule.warmup_epochs": 0.0, **options}
    )
    model = _model(recipe)
    scheduler = make_schedule(recipe, make_optimizer(recipe.optim, model), 4)
    assert scheduler is not None
    for update in range(20):
        scheduler.step_update(update)
        (rate,) = {group["lr"] for group in scheduler.optimizer.param_groups}
        assert rate == pytest.approx(recipe.optim.lr * (1 - update / 20) ** power)


def test_mixing_ends_where_the_recipe_says(vary: Vary, tmp_path: Path) -> None:
    recipe = vary({"loss.mixup": 0.5, "loss.mixup_off_epoch": 2})
    model = _model(recipe)
    losses = Losses(model, str, tmp_path, late=False)
    task = ClassificationTask(recipe, model, num_classes=10, steps_per_epoch=1, losses=losses)
    mixed: list[int] = []
    own = task._mix
    assert own is not None

    def mix(images: Any, targets: Any, index: Any, epoch: int) -> Any:
        mixed.append(epoch)
        return own(images, targets, index, epoch)

    task._mix = mix  # type: ignore[assignment]
    count = torch.arange(4)
    batch: Any = SimpleNamespace(images=torch.rand(4, 1, 12, 12), targets=count, index=count)
    for epoch in range(4):
        task.current_epoch = epoch
        assert torch.isfinite(task.training_step(batch, 0))
    assert mixed == [0, 1]


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_stochastic_depth_is_what_the_recipe_says(vary: Vary, rate: float) -> None:
    """timm's Swin has 0.1 by default."""
    name = "swin_tiny_patch4_window7_224"
    options = {"depths": (2, 1), "num_heads": (1, 2), "embed_dim": 8}
    changes = {"model.name": name, "model.options": options, "model.drop_path": rate}
    recipe = vary({**changes, "model.drop_rate": 0.0})
    model = build_model(recipe, num_classes=10, in_chans=3, image_size=(32, 32))
    rates = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
    assert max(rates, default=0.0) == pytest.approx(rate)


def test_a_model_without_stochastic_depth_is_built_all_the_same(vary: Vary) -> None:
    recipe = vary({"model.name": "vgg11", "model.options": {}, "model.drop_rate": 0.0})
    with torch.device("meta"):
        model = build_model(recipe, num_classes=10, in_chans=3, image_size=(32, 32))
    assert type(model).__name__ == "VGG"
