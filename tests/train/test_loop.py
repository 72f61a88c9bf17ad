# SPDX-License-Identifier: Apache-2.0
"""The training step and its loop, against plain PyTorch."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from keymix.data import ImageData, load
from keymix.data.loaders import Batch
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import parts
from keymix.train.engine import make_training
from keymix.train.loop import Saver
from keymix.train.losses import Teacher
from keymix.train.model import build_model, load_data
from keymix.train.nonfinite import Losses
from keymix.train.recipe import Recipe, replace_path
from keymix.train.scoring import effective_precision
from keymix.train.signals import Interrupts
from keymix.train.step import Training, make_fabric, make_optimizer, make_schedule
from keymix.train.task import seed_step, step_seed
from keymix.train.validate import training_batches

Vary = Callable[[dict[str, Any]], Recipe]
STEPS = 5


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load("digits", limit=80)


def training_of(
    recipe: Recipe, data: ImageData, fabric: Fabric | None = None, teacher: Teacher | None = None
) -> Training:
    model = build_model(recipe, num_classes=10, in_chans=1, image_size=(12, 12))
    losses = Losses(model, data.train.ids, None, late=False)
    task = parts.training_of(data.task).make(
        recipe, model, data, steps=STEPS, losses=losses, teacher=teacher
    )
    return Training(task, fabric or make_fabric(recipe.precision), steps=STEPS)


def batch(number: int) -> Batch:
    images = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(number))
    return Batch(images=images, targets=torch.arange(6), index=torch.arange(6))


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(mine: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_five_batches_in_windows_of_three_are_a_plain_loop(vary: Vary, digits: ImageData) -> None:
    recipe = vary({"optim.accumulate": 3, "optim.clip_grad": 0.1, "ema": 0.9})
    training = training_of(recipe, digits)
    for number in range(STEPS):
        training.step(batch(number))

    model = build_model(recipe, num_classes=10, in_chans=1, image_size=(12, 12))
    optimizer = make_optimizer(recipe.optim, model)
    schedule = make_schedule(recipe, optimizer, 2)
    average = ModelEmaV3(model, decay=0.9, use_warmup=True)
    assert schedule is not None
    for update, window in enumerate(((0, 1, 2), (3, 4)), start=1):
        optimizer.zero_grad()
        for number in window:
            seed_step(step_seed(recipe.seed, 0, number), torch.device("cpu"))
            loss = nn.functional.cross_entropy(model(batch(number).images), torch.arange(6))
            torch.autograd.backward(loss / 3)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        average.update(model, step=update)
        schedule.step_update(update)
    assert training.updates == 2
    assert same(weights(training.task.model), weights(model))
    assert same(weights(training.task.evaluated), weights(average.module))
    assert training._optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_bfloat16_step_has_the_dtypes_of_mixed_precision_throughout(
    vary: Vary, digits: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a step of the Trainer had: one autocast over model, teacher and loss, no cache."""
    recipe = vary({"precision": "bf16", "loss.distill": 0.5, "loss.distill_teacher": "teacher"})
    seen: dict[str, tuple[Any, ...]] = {}

    def noted(owner: type, name: str) -> None:
        own = getattr(owner, name)

        def note(self: Any, *args: Any) -> Any:
            made = own(self, *args)
            context = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
            seen[name] = (*(a.dtype for a in args if isinstance(a, Tensor)), made.dtype, *context)
            return made

        monkeypatch.setattr(owner, name, note)

    for owner, name in ((Teacher, "answers"), (Teacher, "term"), (ClassificationTask, "loss")):
        noted(owner, name)
    other = build_model(
        replace_path(recipe, {"seed": 1}), num_classes=10, in_chans=1, image_size=(12, 12)
    )
    training_of(recipe, digits, teacher=Teacher(other, 2.0)).step(batch(0))
    full, half = torch.float32, torch.bfloat16
    assert seen["answers"] == (full, half, True, False)
    assert seen["term"] == (full, full, full, True, False)
    assert seen["loss"] == (full, torch.int64, full, True, False)


def test_the_scaler_of_losses_is_undone_before_clipping_and_kept(
    vary: Vary, digits: ImageData
) -> None:
    recipe = vary({"optim.name": "rmsprop", "optim.clip_grad": 0.1})

    def scaled() -> Training:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)  # type: ignore[attr-defined]
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        return training_of(recipe, digits, Fabric(accelerator="cpu", devices=1, plugins=[plugin]))

    plain, mine = training_of(recipe, digits), scaled()
    for number in range(3):
        plain.step(batch(number))
        mine.step(batch(number))
    assert same(weights(mine.task.model), weights(plain.task.model))  # powers of two are exact
    state = mine.state()
    assert state["scaler"]["scale"] == 8.0
    assert plain.state()["scaler"] == {}
    again = scaled()
    again.restore(state)
    assert again.fabric.strategy.precision.state_dict() == state["scaler"]


def test_each_module_gets_back_the_mode_that_it_had(vary: Vary, digits: ImageData) -> None:
    training = training_of(vary({"ema": 0.9}), digits)
    frozen = next(
        module for module in training.task.model.modules() if isinstance(module, nn.Dropout)
    )
    frozen.eval()
    before = [module.training for module in training.task.modules()]
    assert {*before} == {True, False}
    with training.evaluating():
        assert not any(module.training for module in training.task.modules())
    assert [module.training for module in training.task.modules()] == before


@pytest.mark.parametrize(
    ("batch", "asked", "minutes", "due"),
    [
        (0, False, 0, True),  # the end of an epoch
        (2, False, 9, False),
        (2, True, 0, True),
        (2, False, 10, True),
        (3, True, 99, False),  # gradients are being accumulated
        (5, True, 99, False),  # the end of the epoch saves
    ],
)
def test_when_a_run_is_saved(batch: int, asked: bool, minutes: float, due: bool) -> None:
    now = [0.0]
    place: Any = SimpleNamespace(batch=batch, steps=5, accumulate=2)
    interrupts = Interrupts(lambda: "")
    record: Any = None
    saver = Saver(place, record, interrupts, minutes=10, clock=lambda: now[0])
    now[0] = 60 * minutes
    interrupts.signum = signal.SIGTERM if asked else None
    assert saver.due() is due


@pytest.mark.parametrize(
    ("name", "value"),
    [("LT_DEVICES", "2"), ("LT_STRATEGY", "ddp"), ("LT_PRECISION", "bf16-mixed")],
)
def test_variables_of_fabrics_command_do_not_change_a_recipe(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    fabric = make_fabric("32")
    strategy = type(fabric.strategy).__name__
    assert (strategy, fabric.world_size) == ("SingleDeviceStrategy", 1)
    assert fabric.strategy.precision.precision == "32-true"
    assert os.environ[name] == value


@pytest.mark.parametrize(
    ("precision", "device", "wanted"),
    [
        ("auto", "cpu", "32"),
        ("auto", "cuda", "bf16"),
        ("32", "cuda", "32"),
        ("bf16", "cpu", "bf16"),
        ("16", "cuda", "16"),
    ],
)
def test_auto_precision_depends_on_the_device_alone(
    precision: str, device: str, wanted: str
) -> None:
    assert effective_precision(precision, torch.device(device)) == wanted


def test_nothing_of_a_training_outlives_its_task(tiny: Recipe) -> None:
    data = load_data(tiny.data)
    model = build_model(tiny, num_classes=10, in_chans=1, image_size=(12, 12))
    training = make_training(tiny, data, model, None, steps=5)
    training.step(next(iter(training_batches(tiny, data).batches())))
    seen = weakref.ref(model)
    gc.disable()  # on a GPU its memory is wanted before Python happens to look for cycles
    try:
        del training, model
        assert seen() is None
    finally:
        gc.enable()
