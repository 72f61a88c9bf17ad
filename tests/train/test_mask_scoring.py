# SPDX-License-Identifier: Apache-2.0
"""Scores and losses of masks against numbers known beforehand, from answers that are given."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from keymix.analysis import overlap
from keymix.analysis.overlap import surface_scores
from keymix.data import load
from keymix.data.dataset import ImageData
from keymix.data.loaders import Loader
from keymix.data.rle import encode
from keymix.errors import UserError
from keymix.tasks.segmentation.answers import ANSWERS, MaskAnswers
from keymix.tasks.segmentation.facts import MaskDetails, MaskOptions
from keymix.tasks.segmentation.losses import boundary_loss, loss_of_each, mean_loss, overlap_loss
from keymix.tasks.segmentation.scoring import (
    BINS,
    MaskScores,
    calibration_error,
    confidence_bins,
)
from keymix.tasks.segmentation.training import SegmentationTask, weights_of_classes
from keymix.train.nonfinite import Losses
from keymix.train.recipe import DataConfig, ModelConfig, Recipe, TaskConfig

CPU = torch.device("cpu")


class Answering(nn.Module):
    """A segmenter that answers every image with the same logits ``[K, H, W]``."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits.expand(len(images), -1, -1, -1)


def sure_of(mask: np.ndarray, classes: int) -> Answering:
    """Answer with the class numbers of a mask."""
    planes = [torch.from_numpy(mask == k) for k in range(classes)]
    return Answering(torch.stack(planes).double().float() * 10)


def scored(model: nn.Module, data: ImageData) -> tuple[MaskAnswers, MaskDetails]:
    batches = Loader(data.test, data, batch_size=2, train=False)
    found = ANSWERS.evaluate(model, batches, data.test, data, device=CPU)
    assert isinstance(found.answers, MaskAnswers)
    assert isinstance(found.own, MaskDetails)
    return found.answers, found.own


@pytest.fixture
def data_of(tmp_path: Path) -> Callable[[np.ndarray], ImageData]:
    """A set ``masks:PATH`` of six images with one mask, of background, leaf and root."""

    def write(mask: np.ndarray) -> ImageData:
        for kind in ("images", "masks"):
            (tmp_path / kind).mkdir()
        (tmp_path / "classes.txt").write_text("background\nleaf\nroot\n")
        rng = np.random.default_rng(0)
        for k in range(6):
            image = rng.integers(0, 256, mask.shape, dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "images" / f"p{k}.png")
            Image.fromarray(mask.astype(np.uint8)).save(tmp_path / "masks" / f"p{k}.png")
        return load(f"masks:{tmp_path}", test_fraction=0.5, val_fraction=0.4)

    return write


def test_counts_are_taken_where_only_deterministic_operations_are_allowed() -> None:
    found, truth = torch.randint(0, 3, (2, 2, 5, 5), generator=torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)
    try:
        counts = overlap.count_overlap(found, truth, num_classes=3, multilabel=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts[..., 2].sum(1).tolist() == [25, 25]


def test_the_loss_of_a_split_is_the_mean_over_its_pixels_that_count(
    data_of: Callable[[np.ndarray], ImageData],
) -> None:
    data = data_of(np.zeros((4, 6)))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 4, 6, generator=generator)
    targets = torch.randint(0, 3, (5, 4, 6), generator=generator)
    targets[:2, 1:] = 255
    scores = MaskScores(data)
    for part in (slice(0, 2), slice(2, 5)):
        counts = scores.update(logits[part], targets[part])
        wanted = overlap.overlap_counts(
            logits[part].argmax(1), targets[part], num_classes=3, multilabel=False
        )
        np.testing.assert_array_equal(counts.numpy(), wanted)
    loss = scores.metrics()["loss"]
    assert loss == pytest.approx(float(mean_loss(logits, targets, multilabel=False)), rel=1e-6)


def test_ignored_pixels_are_no_way_off(data_of: Callable[[np.ndarray], ImageData]) -> None:
    truth = np.zeros((6, 8))
    truth[2, 1], truth[:, 5:], truth[5, 0] = 1, 255, 2
    found = np.where(truth == 255, 1, truth)
    found[2, 3] = 1  # two pixels off, nearer than the ignored ones
    answers, details = scored(sure_of(found, 3), data_of(truth))
    assert details.distance_unit == "px"
    assert answers.surfaces[:, 1, 0].tolist() == pytest.approx([1.9] * len(answers.index))
    assert answers.surfaces[:, 2, 0].tolist() == [0.0] * len(answers.index)
    assert answers.counts[0].tolist() == [[27, 27, 28], [1, 2, 1], [1, 1, 1]]


def expected_error(sure: np.ndarray, right: np.ndarray) -> float:
    """The definition, bin by bin: the gap of each, by the share of the answers in it."""
    edges = np.linspace(0, 1, BINS + 1)
    places = [(low <= sure) & (sure < high) for low, high in itertools.pairwise(edges)]
    gaps = [abs(right[at].mean() - sure[at].mean()) * at.mean() for at in places if at.any()]
    return float(sum(gaps))


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_calibration_error_is_that_of_the_pixels_that_count(multilabel: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(5, 3, 8, 9, generator=generator, dtype=torch.float64)
    shape = (5, 3, 8, 9) if multilabel else (5, 8, 9)
    targets = torch.randint(0, 2 if multilabel else 3, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.2] = 255
    found = sum(
        confidence_bins(*each, multilabel=multilabel, classes=[1, 2]).numpy()
        for each in zip(logits, targets, strict=True)
    )
    if multilabel:
        shares, truth = logits[:, 1:].sigmoid(), targets[:, 1:]
        sure, right = torch.maximum(shares, 1 - shares), (shares > 0.5) == (truth == 1)
    else:
        shares, truth = logits.softmax(1), targets
        sure, right = shares.max(1).values, shares.argmax(1) == truth
    counted = truth != 255
    wanted = expected_error(sure[counted].numpy(), right[counted].numpy())
    assert calibration_error(found) == pytest.approx(wanted, rel=1e-9)
    assert found[:, 0].sum() == counted.sum()
    assert math.isnan(calibration_error(np.zeros((BINS, 3))))
    logits[0] = math.nan  # of a model that diverged
    of_first = confidence_bins(logits[0], targets[0], multilabel=multilabel, classes=[1, 2])
    assert of_first.sum() == 0


def test_cases_begin_with_the_worst_and_are_scored_over_all_their_pixels(tmp_path: Path) -> None:
    data = load(write_oblong(tmp_path), image_size=(24, 36), test_fraction=0.75, val_fraction=0.5)
    found = np.zeros((24, 36))
    found[:12, :9] = 3  # half of the stomach
    answers, details = scored(sure_of(found, 4), data)
    names = sorted({*data.test.groups})
    assert len(names) == len(details.cases) > 1
    for case in details.cases:
        assert (case.images, case.jaccard) == (1, 0.5)
        assert case.dice == (None, None, pytest.approx(2 / 3))
    answers.counts[1, 3, 0] = 0
    worse = replace(answers).details("mm", names)  # whose cases are counted again
    assert worse.cases[0].name == names[1]
    assert worse.cases[0].dice[2] == 0


def write_oblong(folder: Path) -> str:
    """Write cases of 24 rows of 1.5 mm and 36 columns of 2 mm; the stomach is a quarter."""
    inside = np.zeros((24, 36), dtype=bool)
    inside[:12, :18] = True
    rows, pixels = [("id", "class", "segmentation")], np.arange(24 * 36).reshape(24, 36)
    for case in range(1, 5):
        scans = folder / "train" / f"case{case}" / f"case{case}_day1" / "scans"
        scans.mkdir(parents=True)
        Image.fromarray(pixels.astype(np.uint16)).save(scans / "slice_0001_36_24_2.00_1.50.png")
        organs = {"large_bowel": "", "small_bowel": "", "stomach": encode(inside)}
        rows += [(f"case{case}_day1_slice_0001", organ, runs) for organ, runs in organs.items()]
    with (folder / "train.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return f"uwgi:{folder}"


@pytest.mark.parametrize(
    ("rows", "columns", "far"),
    [(19, 8, 3 * 1.125), (16, 10, 2 * 4.5), (19, 10, math.hypot(3 * 1.125, 2 * 4.5))],
)
def test_distances_are_millimetres_of_rows_and_columns_each(
    rows: int, columns: int, far: float, tmp_path: Path
) -> None:
    spec = write_oblong(tmp_path)
    data = load(spec, image_size=(32, 16), test_fraction=0.3, val_fraction=0.3)
    found = np.zeros((32, 16))
    found[:rows, :columns] = 3  # the truth is [:16, :8]
    answers, details = scored(sure_of(found, 4), data)
    assert details.distance_unit == "mm"
    assert details.hd95_px is None
    wanted = surface_scores(found == 3, data.test.mask(0).numpy() == 3, (1.125, 4.5))
    assert wanted[0] == pytest.approx(far, rel=0.2)
    for measured in answers.surfaces[:, 3].tolist():
        assert measured == pytest.approx(wanted, rel=1e-12)


@pytest.fixture
def task(data_of: Callable[[np.ndarray], ImageData], tmp_path: Path) -> SegmentationTask:
    """A task with a Dice loss of weight 1/4, and a model whose answers are drawn."""
    recipe = Recipe(
        name="scored",
        data=DataConfig(spec="masks:scored"),
        model=ModelConfig(name="setr_micro"),
        task=TaskConfig(options={"dice": 0.25}),
    )
    model = Answering(torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)))
    losses = Losses(model, str, tmp_path, late=False)
    data = data_of(np.zeros((4, 6)))
    return SegmentationTask(recipe, model, data=data, steps_per_epoch=1, losses=losses)


def test_the_training_loss_weighs_cross_entropy_and_dice(task: SegmentationTask) -> None:
    targets = torch.randint(0, 3, (2, 4, 6), generator=torch.Generator().manual_seed(1))
    loss = task.step_loss(torch.zeros(2, 1, 4, 6), targets)
    wanted = 0.75 * float(loss.recorded) + 0.25 * float(loss.terms["dice_loss"])
    assert float(loss.trained) == pytest.approx(wanted, rel=1e-6)
    task.recipe = replace(task.recipe, task=TaskConfig())
    plain = task.step_loss(torch.zeros(2, 1, 4, 6), targets)
    assert float(plain.trained) == float(plain.recorded) == float(loss.recorded)
    assert not plain.terms


def test_a_training_step_takes_the_losses_of_the_options(task: SegmentationTask) -> None:
    targets = torch.randint(0, 3, (2, 4, 6), generator=torch.Generator().manual_seed(1))
    options = {"dice": 0.25, "tversky": (0.3, 0.7), "focal": 2.0, "boundary": 0.1}
    task.recipe = replace(task.recipe, task=TaskConfig(options=options))
    task.class_weights = torch.tensor([0.5, 1.0, 4.0])
    inputs = torch.zeros(2, 1, 4, 6)
    logits, loss = task.model(inputs).detach(), task.step_loss(inputs, targets)
    pixels = mean_loss(
        logits, targets, multilabel=False, focal=2.0, weights=torch.tensor([0.5, 1.0, 4.0])
    )
    dice = overlap_loss(logits, targets, multilabel=False, classes=[1, 2], tversky=(0.3, 0.7))
    edge = boundary_loss(logits, targets, multilabel=False, classes=[1, 2])
    assert float(loss.trained) == pytest.approx(
        float(0.75 * pixels + 0.25 * dice + 0.1 * edge), rel=1e-6
    )
    assert float(loss.recorded) == pytest.approx(
        float(mean_loss(logits, targets, multilabel=False)), rel=1e-6
    )
    assert loss.terms.keys() == {"dice_loss", "boundary_loss"}


def test_balanced_weights_give_each_class_the_same_sum(
    data_of: Callable[[np.ndarray], ImageData],
) -> None:
    truth = np.zeros((6, 8))
    truth[:3, :4], truth[5, :2], truth[0, 0] = 1, 2, 255  # 34, 11 and 2 pixels
    data = data_of(truth)
    weights = weights_of_classes(MaskOptions(class_weights="balanced"), data)
    assert weights is not None
    assert (weights * torch.tensor([34.0, 11.0, 2.0])).tolist() == pytest.approx([47 / 3] * 3)
    first = data.classes[1]
    weights = weights_of_classes(MaskOptions(class_weights={first: 3.0}), data)
    assert weights is not None
    assert weights.tolist() == [1, 3, 1]
    with pytest.raises(UserError, match="liver"):
        weights_of_classes(MaskOptions(class_weights={"liver": 3.0}), data)
    assert weights_of_classes(MaskOptions(), data) is None


def test_the_dice_loss_leaves_the_background_out(task: SegmentationTask) -> None:
    targets = torch.randint(0, 3, (2, 4, 6), generator=torch.Generator().manual_seed(1))
    inputs = torch.zeros(2, 1, 4, 6)
    logits, terms = task.model(inputs).detach(), task.step_loss(inputs, targets).terms
    organs, all_ = (
        float(overlap_loss(logits, targets, multilabel=False, classes=classes))
        for classes in ([1, 2], [0, 1, 2])
    )
    assert abs(organs - all_) > 0.01
    assert float(terms["dice_loss"].detach()) == pytest.approx(organs, rel=1e-6)


def test_the_loss_of_an_image_is_the_mean_over_its_own_pixels_that_count(
    task: SegmentationTask,
) -> None:
    targets = torch.randint(0, 3, (3, 4, 6), generator=torch.Generator().manual_seed(1))
    targets[1, 1:], targets[2] = 255, 255
    logits = task.model(torch.zeros(3, 1, 4, 6)).detach()
    losses = loss_of_each(logits, targets, multilabel=False)
    for i in range(2):
        alone = mean_loss(logits[i : i + 1], targets[i : i + 1], multilabel=False)
        assert float(losses[i]) == pytest.approx(float(alone), rel=1e-6)
    assert float(losses[2]) == 0.0
