# SPDX-License-Identifier: Apache-2.0
"""A task of one's own in one file: a number for each image, no classes, less is better.

`keymix` reads this file with ``--import`` as a user's; the tests below train, stop, resume,
evaluate, predict, compare and report it without a change under ``src``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from toy_tasks import check_resume, compared, judged_difference, registered

import keymix
from costs import cheap_costs
from keymix.analysis.answers import Answers, Arrays, FloatArray, IntArray, whole
from keymix.cli import main
from keymix.compare.run import rebuild
from keymix.data.record import DataRecord
from keymix.data.sample import Faults, Source, array_rows
from keymix.report.words import said
from keymix.task import Score, Task
from keymix.train.model import load_data
from keymix.train.parts import (
    AnswersPart,
    Evaluated,
    Inputs,
    Prediction,
    Reference,
    TrainingPart,
    answers_of,
)
from keymix.train.recipe import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    replace_path,
)
from keymix.train.scoring import Outputs
from keymix.train.task import StepLoss, TrainingTask

SIDE = 12


def _disc(row: int) -> tuple[NDArray[np.uint8], float]:
    random = np.random.default_rng(row)
    radius = random.uniform(1, 5)
    y, x = np.mgrid[:SIDE, :SIDE] - random.uniform(3, 8, (2, 1, 1))
    return (255 * (y * y + x * x < radius * radius)).astype(np.uint8), float(radius)


def open_discs(argument: str, faults: Faults) -> Source:
    """List so many discs of different radius; the number is the radius in pixels."""
    found = [_disc(i) for i in range(int(argument or 120))]
    pixels = np.stack([image for image, _ in found])[:, None]
    radii = [np.array([radius], dtype=np.float32) for _, radius in found]
    return Source(rows=array_rows("disc", pixels, radii), in_chans=1)


@dataclass(frozen=True, eq=False)
class Radii(Answers):
    """The radius said of each disc, and the true one."""

    index: IntArray
    target: FloatArray
    value: FloatArray

    @property
    def units(self) -> int:
        return len(self.target)

    def score(self, weights: FloatArray) -> FloatArray:
        wrong = np.abs(self.value - self.target)
        scores: FloatArray = weights @ wrong / weights.sum(axis=1)
        return scores

    def shared(self) -> Arrays:
        return {"index": self.index, "target": self.target}

    def arrays(self, which: str) -> Arrays:
        return {f"{which}_value": self.value}

    def same_truth(self, other: Answers) -> bool:
        return isinstance(other, Radii) and np.array_equal(self.target, other.target)

    def degenerate(self) -> tuple[str, ...]:
        constant = len(self.value) > 1 and float(np.ptp(self.value)) < 1e-6
        return ("every image got the same number",) if constant else ()


class RadiusTraining(TrainingPart):
    """One output; the rest is `Regression`."""

    def outputs(self, data: DataRecord) -> int:
        return 1

    def make(self, recipe: Any, model: nn.Module, data: Any, **more: Any) -> Regression:
        return Regression(
            recipe, model, data=data, steps_per_epoch=more["steps"], losses=more["losses"]
        )


class Regression(TrainingTask):
    """Mean absolute error in pixels."""

    def step_loss(self, images: Inputs, targets: Tensor) -> StepLoss:
        wrong = (self.trained(images).float() - targets).abs()[:, 0]
        return StepLoss(recorded=wrong.mean(), trained=wrong.mean(), each=wrong.detach)


class RadiusAnswers(AnswersPart):
    def evaluated(self, outputs: Outputs, split: Any, data: Any, device: Any) -> Evaluated:
        found = [
            (batch.index, batch.targets[:, 0], output[:, 0].float()) for batch, output in outputs
        ]
        index, target, value = (torch.cat(part).cpu().numpy() for part in zip(*found, strict=True))
        answers = Radii(index, target.astype(np.float64), value.astype(np.float64))
        loss = float(np.abs(answers.value - answers.target).mean())
        return Evaluated(scores={"loss": loss, "mae": loss}, answers=answers)

    def read(self, stored: Arrays, which: Literal["last", "best"], data: DataRecord) -> Answers:
        return Radii(stored["index"], stored["target"], stored[f"{which}_value"])

    def predictions(
        self, outputs: Tensor, paths: Sequence[str], seen: DataRecord, *, top: int
    ) -> Iterator[Radius]:
        for path, value in zip(paths, outputs[:, 0].tolist(), strict=True):
            yield Radius(path=path, radius=value)

    def references(self, data: Any) -> Iterator[Reference]:
        mean = float(data.train.values.mean())
        index = np.arange(len(data.test))
        target = data.test.values[:, 0].double().numpy()
        answers = Radii(index, target, np.full(len(target), mean))
        found = Evaluated(scores={"mae": whole(answers)}, answers=answers)
        yield Reference(name="mean of training", about="", evaluated=found, learned=False)


@dataclass(frozen=True, kw_only=True)
class Radius(Prediction):
    """The radius of a file's disc, pixels."""

    radius: float = float("nan")


RadiusAnswers.prediction = Radius


def register() -> None:
    """Register the task and its data, as a file for ``--import`` does."""
    keymix.register_task(
        Task(
            name="radius",
            does="says a radius for each image",
            holds="images with a number each",
            scores=(
                Score(
                    key="mae",
                    name="mean absolute error",
                    short="MAE",
                    label="error",
                    better="less",
                    high=None,
                    unit="px",
                ),
            ),
            models="classification",
            recipes={"": "small_images_vit"},
            training=RadiusTraining(),
            answers=RadiusAnswers(),
        )
    )
    keymix.source("discs", argument="[N]", summary="discs of a radius", task="radius")(open_discs)


if __name__.startswith("keymix_user"):
    register()

RECIPE = Recipe(
    name="discs",
    data=DataConfig(spec="discs:120", batch_size=16),
    model=ModelConfig(name="vit_nano_p2_12", options={"depth": 1}),
    optim=OptimConfig(lr=3e-3),
    schedule=ScheduleConfig(epochs=2),
)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with registered(register), cheap_costs():
        yield


def test_train_stop_resume(tmp_path: Path) -> None:
    check_resume(RECIPE, tmp_path, weights=2)


def test_less_is_better(tmp_path: Path) -> None:
    run = keymix.train(replace_path(RECIPE, {"schedule.epochs": 4}), tmp_path / "run")
    errors = [line["val_mae"] for line in run.metrics()]
    assert run.summary.best.val["mae"] == min(error for error in errors if error is not None)
    assert keymix.evaluate(run)["mae"] == run.summary.last.test.scores["mae"]
    assert keymix.load_run(tmp_path / "run").summary == run.summary


def test_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keymix.train(RECIPE, tmp_path / "run")
    for row in (5, 6):
        Image.fromarray(_disc(row)[0]).save(tmp_path / f"{row}.png")
    (tmp_path / "7.png").write_bytes(b"no image")
    files = [str(tmp_path / f"{row}.png") for row in (5, 6, 7)]
    found = keymix.predict(tmp_path / "run", files)
    assert [each.error is None for each in found] == [True, True, False]
    assert 0 < found[0].radius < 8
    given = ["predict", str(tmp_path / "run"), *files, "--import", __file__, "--format", "csv"]
    assert main(given) == 2
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
def test_compare_and_report(tmp_path: Path) -> None:
    found = compared(RECIPE, tmp_path / "out", __file__)
    rows = {row.mixer: row for row in found.record.outcome.last}
    assert set(rows) == {"softmax", "identity"}
    interval = rows["identity"].images
    assert interval is not None
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low <= interval.difference <= interval.high
    page = found.report.read_text(encoding="utf-8")
    assert "error" in page
    assert "accuracy" not in page
    assert "px against" in " ".join(said("verdicts", found.record))
    again = rebuild(tmp_path / "out", imports=[__file__])
    assert again.record.outcome == found.record.outcome


def test_a_larger_error_is_worse() -> None:
    judgement = judged_difference("radius", 0.5)
    assert (judgement.degree, judgement.direction) == ("clear", "worse")
    assert judged_difference("radius", -0.5).direction == "better"


def test_one_number_for_all_images_is_seen() -> None:
    said = Radii(np.arange(3), np.array([1.0, 2.0, 3.0]), np.full(3, 2.0))
    assert said.degenerate()
    data = load_data(RECIPE.data)
    (reference,) = answers_of(data.task).references(data)
    mean = reference.evaluated
    assert mean.answers.degenerate()
    assert mean.scores["mae"] == pytest.approx(whole(mean.answers))
