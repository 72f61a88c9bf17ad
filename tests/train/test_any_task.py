# SPDX-License-Identifier: Apache-2.0
"""Training asks little of a task: lists of images, losses by name, no loss in validation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keymix.analysis.answers import Answers, Arrays, FloatArray, IntArray, whole
from keymix.data.record import DataRecord
from keymix.task import Score, Task
from keymix.train import loop
from keymix.train.nonfinite import Losses
from keymix.train.parts import AnswersPart, Evaluated, Prediction
from keymix.train.recipe import Recipe
from keymix.train.scoring import Inputs, Outputs
from keymix.train.step import Training, make_fabric
from keymix.train.task import StepLoss, TrainingForward, TrainingTask


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels(Answers):
    """A number per image."""

    index: IntArray
    said: FloatArray

    @property
    def units(self) -> int:
        return len(self.index)

    def score(self, weights: FloatArray) -> FloatArray:
        found: FloatArray = np.sqrt((weights * self.said**2).sum(1) / weights.sum(1))
        return found

    def shared(self) -> Arrays:
        return {"index": self.index}

    def arrays(self, which: str) -> Arrays:
        return {f"{which}_said": self.said}

    def same_truth(self, other: Answers) -> bool:
        return np.array_equal(self.index, other.index)


@dataclass(frozen=True, kw_only=True)
class Level(Prediction):
    """The level of an image."""

    level: float | None = None
    place: tuple[int, int] | None = None


class LevelAnswers(AnswersPart):
    prediction = Level

    def evaluated(self, outputs: Outputs, split: Any, data: Any, device: Any) -> Evaluated:
        said, index = [], []
        for batch, levels in outputs:
            said += [float(level) for level in levels]
            index += batch.index.tolist()
        answers = Levels(index=np.array(index), said=np.array(said))
        return Evaluated(scores={"rmse": whole(answers)}, answers=answers)

    def read(self, stored: Arrays, which: Literal["last", "best"], data: DataRecord) -> Levels:
        return Levels(index=stored["index"], said=stored[f"{which}_said"])


RMSE = Score(
    key="rmse", name="error", short="RMSE", label="error", better="less", high=None, unit=""
)
LEVELS = Task(
    name="levels",
    does="tells levels",
    holds="images with a level each",
    scores=(RMSE,),
    validation_loss=False,
    answers=LevelAnswers(),
)


class Mean(nn.Module):
    """Losses by name in training, levels else; images have sizes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, images: Inputs, targets: list[Tensor] | None = None) -> Any:
        levels = [self.factor * image.mean() for image in images]
        if not self.training:
            return levels
        assert targets is not None
        errors = [level - target for level, target in zip(levels, targets, strict=True)]
        return {"square": torch.stack(errors).square().mean(), "size": self.factor.square()}


class LevelTask(TrainingTask):
    kind = LEVELS

    def step_loss(self, images: Inputs, targets: Any) -> StepLoss:
        return StepLoss.of_parts(self.trained(images, targets))


@dataclass(frozen=True)
class Listed:
    images: Inputs
    targets: Any
    index: Tensor


def batch(number: int) -> Listed:
    generator = torch.Generator().manual_seed(number)
    images = [torch.randn(1, side, 5, generator=generator) for side in (3, 4, 7)]
    return Listed(images, [torch.tensor(1.0)] * 3, torch.arange(3) + 3 * number)


class Served:
    """Two batches of a split."""

    split = None

    def batches(self, start: int = 0) -> Iterator[Listed]:
        return iter([batch(0), batch(1)][start:])


class Calm:
    """No signal comes."""

    @contextmanager
    def waiting(self, *, grace: float) -> Iterator[None]:
        yield

    def look(self) -> None:
        pass


@pytest.fixture
def training(tiny: Recipe, tmp_path: Path) -> Training:
    losses = Losses(model := Mean(), str, tmp_path, late=False)
    data: Any = SimpleNamespace(task=LevelTask.kind, record=lambda: None, image_size=(4, 4))
    task = LevelTask(tiny, model, data=data, steps_per_epoch=2, losses=losses)
    return Training(task, make_fabric("32"), steps=2)


def test_lists_of_images_and_losses_by_name_train(training: Training) -> None:
    task = training.task
    before = [float(parameter) for parameter in task.model.parameters()]
    for number in range(2):
        training.step(batch(number))
    means = task.losses.means()
    assert means["loss"] == pytest.approx(means["square"] + means["size"])
    assert [float(parameter) for parameter in task.model.parameters()] != before


def test_a_validation_without_a_loss_is_scored_as_the_test_is(training: Training) -> None:
    served, calm = Served(), Calm()
    found = loop.validate(training, served, calm)  # type: ignore[arg-type]
    assert found.keys() == {"rmse"}
    assert training.task.model.training
    wanted = [0.5 * float(image.mean()) for b in served.batches() for image in b.images]
    assert found["rmse"] == pytest.approx(math.sqrt(sum(w**2 for w in wanted) / len(wanted)))


def test_a_list_of_images_is_not_compiled() -> None:
    model = Mean().eval()
    forward = TrainingForward(model, compile=True)
    assert torch.equal(forward(batch(0).images)[0], model(batch(0).images)[0])


def test_predictions_of_any_fields_are_printed() -> None:
    part = LevelAnswers()
    found = [Level(path="a.png", level=0.25, place=(1, 2)), Level(path="b.png", level=1e-7)]
    table = part.table(found, "image")
    assert list(table.heads) == ["image", "level", "place"]
    assert [list(row) for row in table.rows] == [
        ["a.png", "0.25", "[1, 2]"],
        ["b.png", "1e-07", "–"],
    ]
    assert [list(row) for row in part.csv(found).rows][1] == ["b.png", 1e-7, None]
    assert part.plain(found[0]) == {"path": "a.png", "level": 0.25, "place": [1, 2]}
    assert part.plain(Level(path="c.png", error="broken"))["error"] == "broken"  # type: ignore[index]
