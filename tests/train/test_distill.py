# SPDX-License-Identifier: Apache-2.0
"""A teacher's answers in the loss."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keymix.data.dataset import ImageData
from keymix.data.loaders import Batch
from keymix.errors import Interrupted, KeymixWarning, UserError
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import files
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.losses import Teacher
from keymix.train.model import build_model, load_data
from keymix.train.nonfinite import Losses
from keymix.train.recipe import Recipe, from_dict, replace_path
from keymix.train.runs import Run, load_run
from keymix.train.validate import make_teacher
from tolerances import close, differs

Vary = Callable[[dict[str, Any]], Recipe]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def teacher_run(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = replace_path(tiny_recipe, {"schedule.epochs": 1, "seed": 5, "optim.lr": 1e-2})
    return train(recipe, tmp_path_factory.mktemp("teacher") / "run")


@pytest.fixture(scope="module")
def digits(tiny_recipe: Recipe) -> ImageData:
    return load_data(tiny_recipe.data)


@pytest.fixture
def taught(vary: Vary, teacher_run: Run) -> Callable[..., Recipe]:
    """The tiny run with a teacher."""

    def change(**more: Any) -> Recipe:
        own = {"loss.distill": 0.6, "loss.distill_teacher": str(teacher_run.folder)}
        return vary({**own, **{key.replace("__", "."): value for key, value in more.items()}})

    return change


def batch(size: int = 12) -> Batch:
    images = torch.randn(7, 1, size, size, generator=torch.Generator().manual_seed(0))
    return Batch(images=images, targets=torch.arange(7), index=torch.arange(7))


def task_of(recipe: Recipe, teacher: Teacher | None, folder: Path) -> ClassificationTask:
    model = build_model(recipe, num_classes=10, in_chans=1, image_size=(12, 12))
    losses = Losses(model, str, folder, late=False)
    return ClassificationTask(
        recipe, model, num_classes=10, steps_per_epoch=4, losses=losses, teacher=teacher
    )


def made_teacher(recipe: Recipe, data: ImageData) -> Teacher:
    teacher = make_teacher(recipe.loss, data, CPU)
    assert teacher is not None
    return teacher


# ---- the term ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_term_is_t_squared_times_the_mean_divergence(temperature: float) -> None:
    linear = nn.Linear(5, 3).double()
    images = torch.randn(4, 5, dtype=torch.float64)
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    term = Teacher(linear, temperature).term(images, logits)
    term.backward()

    v, z = linear(images).detach().numpy() / temperature, logits.detach().numpy() / temperature
    p = np.exp(v) / np.exp(v).sum(1, keepdims=True)
    q = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    divergence = sum(p[i, j] * math.log(p[i, j] / q[i, j]) for i in range(4) for j in range(3))
    close(term, torch.tensor(temperature**2 * divergence / 4))
    # Hinton et al. 2015, Eq. 2, times T^2: T (q - p), a mean over images
    assert logits.grad is not None
    close(logits.grad, torch.from_numpy(temperature * (q - p) / 4))
    assert all(parameter.grad is None for parameter in linear.parameters())


def test_the_loss_weighs_both_and_the_record_keeps_them_apart(
    taught: Callable[..., Recipe], digits: ImageData, vary: Vary, tmp_path: Path
) -> None:
    recipe = taught(loss__distill_temperature=3.0)
    teacher = made_teacher(recipe, digits)
    plain, added = task_of(vary({}), None, tmp_path), task_of(recipe, teacher, tmp_path)
    cross_entropy, loss = plain.training_step(batch(), 0), added.training_step(batch(), 0)
    means = added.losses.means()
    assert means["loss"] == cross_entropy.item() == plain.losses.means()["loss"]
    close(loss, torch.tensor(0.4 * means["loss"] + 0.6 * means["distill"]))
    assert means["distill"] > 1e-4


def test_the_teacher_sees_the_mixed_images_in_eval_mode_and_stays_out_of_the_state(
    taught: Callable[..., Recipe], digits: ImageData, tmp_path: Path
) -> None:
    recipe = taught(loss__mixup=0.8, loss__cutmix=1.0)
    teacher = made_teacher(recipe, digits)
    task = task_of(recipe, teacher, tmp_path).train()
    seen: dict[str, tuple[Tensor, bool]] = {}
    for name, model in (("student", task.model), ("teacher", teacher._model)):
        model.register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: (args[0], module.training)})
        )
    task.training_step(batch(), 0)
    assert torch.equal(seen["student"][0], seen["teacher"][0])
    assert differs(seen["teacher"][0], batch().images)
    assert (seen["student"][1], seen["teacher"][1]) == (True, False)
    own = task_of(recipe, None, tmp_path)
    assert task.state_dict().keys() == own.state_dict().keys()
    assert len(list(task.parameters())) == len(list(own.parameters()))


def test_classes_in_another_order_are_matched_by_name(
    taught: Callable[..., Recipe], digits: ImageData
) -> None:
    first, second, third, *rest = digits.classes
    turned = replace(digits, classes=(third, first, second, *rest))  # not its own inverse
    plain, mapped = (
        made_teacher(taught(), data).answers(batch().images) for data in (digits, turned)
    )
    by_name = dict(zip(digits.classes, plain.unbind(1), strict=True))
    for name, column in zip(turned.classes, mapped.unbind(1), strict=True):
        assert torch.equal(column, by_name[name]), name
    assert differs(by_name[first], by_name[second])
    assert differs(by_name[second], by_name[third])


def test_images_come_in_the_teachers_normalisation(
    taught: Callable[..., Recipe], digits: ImageData
) -> None:
    pixels = torch.rand(3, 1, 12, 12)
    shifted = replace(digits, mean=(0.5,), std=(0.25,))
    plain, other = (made_teacher(taught(), data) for data in (digits, shifted))
    wanted = plain.answers((pixels - digits.mean[0]) / digits.std[0])
    close(other.answers((pixels - 0.5) / 0.25), wanted)
    assert differs(plain.answers((pixels - 0.5) / 0.25), wanted)


# ---- runs -------------------------------------------------------------------------------------


def test_a_student_of_the_teacher_alone_comes_nearer_to_it(
    taught: Callable[..., Recipe], tmp_path: Path
) -> None:
    alone = {"loss__distill": 1.0, "optim__lr": 1e-2, "schedule__epochs": 4}
    run = train(taught(**alone), tmp_path / "run")
    terms = [line["train_distill"] for line in run.metrics()]
    assert terms[-1] < 0.7 * terms[0]
    assert run.recipe.loss.distill == 1.0


def test_an_interrupted_run_ends_to_the_bit_as_one_that_was_not(
    taught: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = taught(ema=0.9, optim__accumulate=2, loss__mixup=0.4)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(recipe, whole)
    original = ClassificationTask.training_step

    def signalled(self: ClassificationTask, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(ClassificationTask, "training_step", signalled)
    with pytest.raises(Interrupted):
        train(recipe, parted)
    monkeypatch.undo()
    assert checkpoints(parted)
    train(recipe, parted)
    for name in ("weights_last.safetensors", "weights_best.safetensors"):
        assert (whole / name).read_bytes() == (parted / name).read_bytes()
    both = (load_run(folder).metrics() for folder in (whole, parted))
    losses = [[(line["train_loss"], line["train_distill"]) for line in lines] for lines in both]
    assert losses[0] == losses[1]


def test_a_resume_warns_of_a_teacher_that_changed(
    taught: Callable[..., Recipe], teacher_run: Run, tmp_path: Path
) -> None:
    folder = shutil.copytree(teacher_run.folder, tmp_path / "teacher")
    recipe = taught(loss__distill_teacher=str(folder), schedule__epochs=1)
    train(recipe, tmp_path / "run")
    (tmp_path / "run" / files.SUMMARY).unlink()  # as if killed after its only epoch
    state, facts = files.read_weights(folder / files.weights_file("last"))
    halved = {name: tensor / 2 for name, tensor in state.items()}
    files.write_weights(folder / files.weights_file("last"), halved, facts)
    with pytest.warns(KeymixWarning, match="has other weights than the one that this run began"):
        train(recipe, tmp_path / "run")


# ---- refusals ---------------------------------------------------------------------------------


def test_a_recipe_from_before_the_term_still_loads(tiny_recipe: Recipe) -> None:
    values = json.loads(json.dumps(tiny_recipe.to_dict()))
    for name in ("distill", "distill_teacher", "distill_temperature"):
        del values["loss"][name]
    assert from_dict(values) == tiny_recipe


@pytest.mark.parametrize("case", ["nowhere", "no run", "unfinished", "damaged"])
def test_a_folder_that_cannot_teach_is_refused_before_a_file_is_written(
    taught: Callable[..., Recipe], teacher_run: Run, tmp_path: Path, case: str
) -> None:
    folder = tmp_path / "teacher"
    if case == "no run":
        folder.mkdir()
    if case in ("unfinished", "damaged"):
        shutil.copytree(teacher_run.folder, folder)
        weights = folder / files.weights_file("last")
        weights.unlink() if case == "unfinished" else weights.write_bytes(b"{}")
    match = {
        "nowhere": "there is no run",
        "no run": "is no run's folder",
        "unfinished": r"holds no weights_last\.safetensors",
        "damaged": "are damaged",
    }[case]
    with pytest.raises(UserError, match=f"distill_teacher.*cannot teach.*{match}") as refusal:
        train(taught(loss__distill_teacher=str(folder)), tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_teacher_of_other_images_or_classes_is_refused(
    taught: Callable[..., Recipe], digits: ImageData
) -> None:
    loss = taught().loss
    for data, match in (
        (
            replace(digits, image_size=(12, 16)),
            "takes images of 12x12 pixels.*of 12x16",
        ),
        (replace(digits, in_chans=3), "images of 1 channels, and the data has images of 3"),
        (replace(digits, classes=(*digits.classes, "ten")), "it lacks classes of the data: ten"),
        (replace(digits, classes=digits.classes[:9]), "the data lacks classes of it: 9"),
    ):
        with pytest.raises(UserError, match=match):
            make_teacher(loss, data, CPU)
