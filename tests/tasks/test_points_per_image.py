# SPDX-License-Identifier: Apache-2.0
"""A task of one's own in one file: a variable number of points on images of unequal sizes.

Answers are ragged, the losses come from the model itself in training, and there is no loss of the
validation. `keymix` reads this file with ``--import`` as a user's; nothing under ``src`` knows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from toy_tasks import check_resume, compared, registered

import keymix
from costs import cheap_costs
from keymix.analysis.answers import Answers, Arrays, FloatArray, IntArray, whole
from keymix.cli import main
from keymix.compare.run import rebuild
from keymix.data.loaders import Loader
from keymix.data.record import DataRecord
from keymix.data.sample import Faults, Row, Source
from keymix.task import Score, Task
from keymix.train.model import load_data
from keymix.train.parts import AnswersPart, Evaluated, Inputs, Prediction, TrainingPart
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

PATCH, NEAR = 4, 4.0  # pixels: of a patch, and between a point and one that counts as found


def _scene(row: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Bright squares on a dark image whose size depends on the row, and their centres (y, x)."""
    random = np.random.default_rng(row)
    height, width = (int(PATCH * n) for n in random.integers(3, 7, 2))
    image = random.integers(0, 40, (height, width)).astype(np.uint8)
    points = random.uniform(2, (height - 2, width - 2), (int(random.integers(0, 4)), 2))
    for y, x in points.astype(int):
        image[y - 1 : y + 2, x - 1 : x + 2] = 255
    return image, points.astype(np.float32)


def open_scenes(argument: str, faults: Faults) -> Source:
    """List so many scenes."""
    rows = [
        Row(
            id=f"scene {i}",
            image=lambda i=i: torch.from_numpy(_scene(i)[0][None]),
            target=lambda i=i: _scene(i)[1],
        )
        for i in range(int(argument or 60))
    ]
    return Source(rows=rows, in_chans=1)


class PointNet(VisionTransformer):
    """Says of every patch whether it has a point, and where in it; its losses itself in training.

    Takes a list of images ``[C, h, w]``; in training also the points of each, ``[n, 2]``.
    """

    def forward(
        self, images: list[Tensor], targets: list[Tensor] | None = None
    ) -> list[Tensor] | dict[str, Tensor]:
        grids = [self._said(image) for image in images]
        if not self.training:
            return [_points(grid) for grid in grids]
        if targets is None:
            raise ValueError("training needs the points of each image")
        there, where = [], []
        for grid, points in zip(grids, targets, strict=True):
            truth = torch.zeros_like(grid[..., 0])
            for y, x in points.tolist():
                row, column = (
                    min(int(at // PATCH), n - 1) for at, n in zip((y, x), truth.shape, strict=True)
                )
                truth[row, column] = 1
                wanted = grid.new_tensor([y / PATCH - row, x / PATCH - column])
                where.append((grid[row, column, 1:].sigmoid() - wanted).abs().mean())
            there.append(F.binary_cross_entropy_with_logits(grid[..., 0], truth))
        zero = grids[0].sum() * 0
        return {
            "there": torch.stack(there).mean(),
            "where": torch.stack(where).mean() if where else zero,
        }

    def _said(self, image: Tensor) -> Tensor:
        """Answer every patch: ``[h/4, w/4, 3]``."""
        tokens = self.head(self.forward_features(image[None])[0])
        return tokens.view(image.shape[-2] // PATCH, image.shape[-1] // PATCH, 3)


def _points(grid: Tensor) -> Tensor:
    """Points of an image, ``[n, 2]`` in pixels."""
    rows, columns = torch.nonzero(grid[..., 0] > 0, as_tuple=True)
    inside = grid[rows, columns, 1:].sigmoid()
    return (torch.stack([rows, columns], 1) + inside) * PATCH


@register_model
def toy_points_vit(pretrained: bool = False, **given: Any) -> PointNet:
    """A small transformer that takes images of any size."""
    del pretrained
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        given.pop(name, None)
    fixed = {"pos_embed": "none", "class_token": False, "global_pool": ""}
    return PointNet(
        patch_size=PATCH,
        embed_dim=24,
        depth=2,
        num_heads=2,
        dynamic_img_size=True,
        **fixed,
        **given,
    )


toy_points_vit.task = "points"  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Points(Answers):
    """The points said of each image and the true ones, of any number: ragged."""

    index: IntArray
    true: Sequence[FloatArray]
    said: Sequence[FloatArray]

    @property
    def units(self) -> int:
        return len(self.true)

    def score(self, weights: FloatArray) -> FloatArray:
        """F1 of the points found within `NEAR` pixels."""
        counts = np.array(
            [(_found(a, b), len(a) + len(b)) for a, b in zip(self.true, self.said, strict=True)]
        )
        found, points = (weights @ counts.astype(np.float64)).T
        scores: FloatArray = np.where(points > 0, 2 * found / np.maximum(points, 1e-9), 1.0)
        return scores

    def shared(self) -> Arrays:
        return {"index": self.index, **_flat("true", self.true)}

    def arrays(self, which: str) -> Arrays:
        return _flat(f"{which}_said", self.said)

    def same_truth(self, other: Answers) -> bool:
        pairs = zip(self.true, other.true, strict=True) if isinstance(other, Points) else ()
        return isinstance(other, Points) and all(np.array_equal(a, b) for a, b in pairs)

    def degenerate(self) -> tuple[str, ...]:
        return () if any(len(each) for each in self.said) else ("no point was found in any image",)


def _found(true: FloatArray, said: FloatArray) -> int:
    """Count true points that have an answer of their own near by."""
    left, found = list(said), 0
    for point in true:
        near = [float(np.abs(each - point).max()) for each in left]
        if near and min(near) <= NEAR:
            left.pop(int(np.argmin(near)))
            found += 1
    return found


def _flat(name: str, ragged: Sequence[FloatArray]) -> Arrays:
    return {
        name: np.concatenate([np.zeros((0, 2)), *ragged]),
        f"{name}_ends": np.cumsum([len(each) for each in ragged]).astype(np.int64),
    }


def _ragged(name: str, stored: Arrays) -> list[FloatArray]:
    return np.split(stored[name], stored[f"{name}_ends"])[:-1]


class PointTraining(TrainingPart):
    """Three numbers a patch; the losses are the model's."""

    def outputs(self, data: DataRecord) -> int:
        return 3

    def make(self, recipe: Any, model: nn.Module, data: Any, **more: Any) -> FromTheModel:
        return FromTheModel(
            recipe, model, data=data, steps_per_epoch=more["steps"], losses=more["losses"]
        )

    def example(self, shape: tuple[int, ...], batch_size: int) -> list[Tensor]:
        return [torch.randn(shape) for _ in range(batch_size)]

    def training_pass(self, model: nn.Module, inputs: Inputs) -> Tensor:
        losses = model(inputs, [torch.ones(1, 2) for _ in inputs])
        return torch.stack(list(losses.values())).sum()


class FromTheModel(TrainingTask):
    """The sum of the losses that the model returns in training."""

    def step_loss(self, images: Inputs, targets: list[Tensor]) -> StepLoss:
        return StepLoss.of_parts(self.trained(images, targets))


class PointAnswers(AnswersPart):
    """Points found, within `NEAR` pixels."""

    def evaluated(self, outputs: Outputs, split: Any, data: Any, device: Any) -> Evaluated:
        index, true, said = [], [], []
        for batch, output in outputs:
            index.append(batch.index)
            true += [each.double().cpu().numpy() for each in batch.targets]
            said += [each.double().cpu().numpy() for each in output]
        answers = Points(torch.cat(index).cpu().numpy(), true, said)
        return Evaluated(scores={"f1": whole(answers)}, answers=answers)

    def read(self, stored: Arrays, which: Literal["last", "best"], data: DataRecord) -> Answers:
        said = _ragged(f"{which}_said", stored)
        return Points(stored["index"], _ragged("true", stored), said)

    def predictions(
        self, outputs: list[Tensor], paths: Sequence[str], seen: DataRecord, *, top: int
    ) -> Iterator[Prediction]:
        for path, points in zip(paths, outputs, strict=True):
            yield PointsOfAFile(path=path, points=tuple(map(tuple, points.tolist())))


@dataclass(frozen=True, kw_only=True)
class PointsOfAFile(Prediction):
    """The points of a file, rows and columns in pixels."""

    points: tuple[tuple[float, ...], ...] = ()


PointAnswers.prediction = PointsOfAFile


def register() -> None:
    """Register the task and its data, as a file for ``--import`` does."""
    keymix.register_task(
        Task(
            name="points",
            does="finds points in images",
            holds="images with points",
            scores=(Score(key="f1", name="F1 score", short="F1", label="F1"),),
            validation_loss=False,
            whole_images=True,
            training=PointTraining(),
            answers=PointAnswers(),
        )
    )
    keymix.source(
        "scenes",
        argument="[N]",
        summary="squares on images of unequal sizes",
        task="points",
        target="place",
    )(open_scenes)


if __name__.startswith("keymix_user"):
    register()

RECIPE = Recipe(
    name="scenes",
    data=DataConfig(spec="scenes:80", batch_size=8),
    model=ModelConfig(name="toy_points_vit"),
    optim=OptimConfig(lr=3e-3),
    schedule=ScheduleConfig(epochs=2),
)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with registered(register), cheap_costs():
        yield


def test_train_stop_resume(tmp_path: Path) -> None:
    check_resume(RECIPE, tmp_path, weights=2)


def test_losses_of_the_model_and_none_of_the_validation(tmp_path: Path) -> None:
    run = keymix.train(replace_path(RECIPE, {"schedule.epochs": 4}), tmp_path / "run")
    first, *_, last = run.metrics()
    assert "val_loss" not in last
    assert last["train_loss"] == pytest.approx(last["train_there"] + last["train_where"])
    assert last["train_loss"] < first["train_loss"]
    scores = keymix.evaluate(run)
    assert scores["f1"] == run.summary.last.test.scores["f1"] > 0.3
    assert "loss" not in scores


def test_images_keep_their_sizes_in_a_batch() -> None:
    data = load_data(RECIPE.data)
    batch = next(iter(Loader(data.train, data, batch_size=8, train=True, workers=0)))
    assert len({tuple(image.shape) for image in batch.images}) > 1
    assert len({len(points) for points in batch.targets}) > 1
    for image, points, i in zip(batch.images, batch.targets, batch.index.tolist(), strict=True):
        assert image.shape[-2:] == data.train.read(i).shape[-2:]
        assert torch.equal(points, data.train.target(i))


def test_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = keymix.train(replace_path(RECIPE, {"schedule.epochs": 4}), tmp_path / "run")
    files = []
    for row in range(8):
        files.append(str(tmp_path / f"{row}.png"))
        Image.fromarray(_scene(row)[0]).save(files[-1])
    counts = [len(each.points) for each in keymix.predict(run, files)]
    assert max(counts) > min(counts)
    given = ["predict", str(run.folder), *files, "--import", __file__, "--format", "json"]
    assert main(given) == 0
    said = json.loads(capsys.readouterr().out)
    assert [len(each["points"]) for each in said] == counts


@pytest.mark.slow
def test_compare_in_processes_of_their_own_and_report(tmp_path: Path) -> None:
    found = compared(RECIPE, tmp_path / "out", __file__, processes=2)
    assert not found.failed
    assert {row.mixer for row in found.record.outcome.last} == {"softmax", "identity"}
    assert all(row.scores["f1"].mean is not None for row in found.record.outcome.last)
    assert all(cost.macs and cost.latency_ms for cost in found.record.costs.values())
    page = found.report.read_text(encoding="utf-8")
    assert "F1" in page
    assert "accuracy" not in page
    assert rebuild(tmp_path / "out", imports=[__file__]).record.outcome == found.record.outcome


def test_no_point_anywhere_is_seen() -> None:
    none = [np.zeros((0, 2))] * 2
    assert Points(np.arange(2), none, none).degenerate()
