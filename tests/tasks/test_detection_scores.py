# SPDX-License-Identifier: Apache-2.0
"""Detections are matched and scored as COCO does it, by its own tools, also of weighted images."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from keymix.analysis.answers import resamples, whole, without_each
from keymix.analysis.statistics import over_resamples
from keymix.task import get_task
from keymix.tasks.detection.answers import ANSWERS, DetectionAnswers, scored
from keymix.tasks.detection.matching import (
    AREAS,
    SHAPES,
    THRESHOLDS,
    Found,
    Instances,
    encoded,
    matched,
    packed,
    rectangles,
    unpacked,
    wide,
)
from keymix.tasks.detection.page import intervals
from keymix.tasks.detection.scoring import of_each_image

SIZE = (260, 320)
CLASSES = ("ant", "bee", "cat", "dog", "eel")
KEYS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


@dataclass
class Made:
    """True instances and detections of some images."""

    truth: list[Instances]
    found: list[Found]

    @property
    def answers(self) -> DetectionAnswers:
        images = zip(range(len(self.truth)), self.truth, self.found, strict=True)
        return scored(images, CLASSES)

    def of(self, images: Sequence[int]) -> Made:
        return Made([self.truth[i] for i in images], [self.found[i] for i in images])


def none_of(kind: type[Any]) -> dict[str, Any]:
    empty = {"boxes": np.zeros((0, 4)), "labels": np.zeros(0, dtype=np.int64), "masks": []}
    if kind is Found:
        return {**empty, "scores": np.zeros(0)}
    return {**empty, "area": np.zeros(0), "crowd": np.zeros(0, dtype=bool)}


def boxes(random: np.random.Generator, number: int) -> np.ndarray:
    corner = random.uniform(0, 1, (number, 2)) * [SIZE[1] - 10, SIZE[0] - 10]
    far = np.minimum(corner + random.uniform(4, 240, (number, 2)), [SIZE[1], SIZE[0]])
    return np.concatenate([corner, far], axis=1)


def made(images: int = 30, seed: int = 0) -> Made:
    """Random instances, crowds among them, and detections near them, with many equal scores.

    No image has an instance of the last class, but some have detections of it.
    """
    random = np.random.default_rng(seed)
    truth, found = [], []
    for i in range(images):
        true = boxes(random, int(random.integers(0, 8)) if i else 5)
        labels = random.integers(1, len(CLASSES), len(true))
        near, names = list(boxes(random, int(random.integers(0, 6)))), []
        names = random.integers(1, len(CLASSES) + 1, len(near)).tolist()
        for box, label in zip(true, labels, strict=True):
            for _ in range(int(random.integers(0, 4))):
                near.append(box + random.normal(0, 4, 4))
                names.append(int(label))
        said = np.array(near).reshape(-1, 4)
        said[:, 2:] = np.maximum(said[:, 2:], said[:, :2] + 1)
        sides = true[:, 2:] - true[:, :2]
        truth.append(
            Instances(
                boxes=true,
                labels=labels,
                masks=rectangles(true, SIZE),
                area=sides.prod(axis=1) * random.uniform(0.5, 1, len(true)),
                crowd=random.random(len(true)) < 0.15,
            )
        )
        found.append(
            Found(
                boxes=said,
                labels=np.array(names, dtype=np.int64),
                masks=rectangles(said, SIZE),
                scores=random.uniform(0.05, 1, len(said)).round(2),
            )
        )
    return Made(truth, found)


def by_tools(sample: Made) -> dict[str, float]:
    """Score with COCO's tools; -1 of a score without instances becomes NaN."""
    images = [{"id": i + 1, "height": SIZE[0], "width": SIZE[1]} for i in range(len(sample.truth))]
    true = [
        {
            "image_id": i + 1,
            "category_id": int(each.labels[j]),
            "bbox": wide(each.boxes)[j].tolist(),
            "area": float(each.area[j]),
            "iscrowd": int(each.crowd[j]),
            "segmentation": dict(each.masks[j]),
        }
        for i, each in enumerate(sample.truth)
        for j in range(len(each.labels))
    ]
    found = [
        {
            "image_id": i + 1,
            "category_id": int(each.labels[j]),
            "score": float(each.scores[j]),
            "bbox": wide(each.boxes)[j].tolist(),
            "segmentation": dict(each.masks[j]),
        }
        for i, each in enumerate(sample.found)
        for j in range(len(each.labels))
    ]
    scores = {}
    for shape, kind, other in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        with contextlib.redirect_stdout(io.StringIO()):
            gt = COCO()
            gt.dataset = {
                "info": {},
                "images": images,
                "annotations": [{**each, "id": n + 1} for n, each in enumerate(true)],
                "categories": [{"id": k + 1, "name": name} for k, name in enumerate(CLASSES)],
            }
            gt.createIndex()
            own = [{k: v for k, v in each.items() if k != other} for each in found]
            run = COCOeval(gt, gt.loadRes(own), kind)
            run.evaluate()
            run.accumulate()
            run.summarize()
        for key, value in zip(KEYS, run.stats[:6], strict=True):
            scores[f"{shape}_{key}"] = float("nan") if value == -1 else float(value)
    return scores


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_of_cocos_tools(seed: int) -> None:
    sample = made(seed=seed)
    ours = sample.answers.scores()
    assert ours == pytest.approx(by_tools(sample), abs=1e-12)
    assert all(0 < value < 1 for value in ours.values() if value is not None)


def test_scores_of_weighted_images_are_those_of_repeated_images() -> None:
    sample = made(12)
    weights = np.random.default_rng(0).integers(0, 3, (3, 12)).astype(np.float64)
    for row, ours in zip(weights, sample.answers.score(weights), strict=True):
        repeated = sample.of(np.repeat(np.arange(12), row.astype(int)).tolist())
        assert ours == pytest.approx(by_tools(repeated)["box_ap"], abs=1e-12)


def test_pseudo_values_are_those_of_scores_without_each_image() -> None:
    answers = made(20).answers
    by_weights = 20 * whole(answers) - 19 * without_each(answers)
    assert answers.unit_values() == pytest.approx(by_weights, abs=1e-10)


def test_ap_of_an_image_is_that_of_the_image_alone() -> None:
    sample = made(8)
    for i, value in enumerate(of_each_image(sample.answers.ranked("box"), 0)):
        alone = by_tools(sample.of([i]))["box_ap50"]
        assert value == pytest.approx(alone, abs=1e-12, nan_ok=True)


def true_as_found(truth: Instances) -> Found:
    single = np.flatnonzero(~truth.crowd)
    return Found(
        boxes=truth.boxes[single],
        labels=truth.labels[single],
        masks=[truth.masks[i] for i in single],
        scores=np.ones(len(single)),
    )


def test_the_truth_as_detections_scores_1() -> None:
    sample = made()
    scores = Made(sample.truth, [true_as_found(each) for each in sample.truth]).answers.scores()
    assert all(value == pytest.approx(1) for value in scores.values())


def test_no_detections_score_0_and_are_named() -> None:
    sample = made()
    answers = Made(sample.truth, [Found(**none_of(Found)) for _ in sample.truth]).answers
    assert set(answers.scores().values()) == {0.0}
    (text,) = answers.degenerate()
    assert "{inputs}" in text
    assert not made().answers.degenerate()


def test_detections_that_find_nothing_are_named() -> None:
    sample = made(6)
    far = [replace(each, boxes=each.boxes * 0 + [0, 0, 1, 1]) for each in sample.found]
    assert len(Made(sample.truth, far).answers.degenerate()) == 1


def test_without_true_instances_nothing_is_scored() -> None:
    sample = made()
    empty = [Instances(**none_of(Instances)) for _ in sample.truth]
    answers = Made(empty, sample.found).answers
    assert set(answers.scores().values()) == {None}
    assert answers.unscorable()
    assert not answers.degenerate()
    assert not made().answers.unscorable()


def test_a_class_without_true_instances_counts_nowhere() -> None:
    sample = made()
    boxes_of_classes = sample.answers.by_class("box")
    assert np.isnan(boxes_of_classes[-1])
    kept = [each.chosen(np.flatnonzero(each.labels < len(CLASSES))) for each in sample.found]
    assert Made(sample.truth, kept).answers.scores() == pytest.approx(sample.answers.scores())


def one_image(crowd: bool, *found: tuple[float, float, float, float]) -> Made:
    """An instance at the left and one at the right, a crowd or not; all detections are sure."""
    true = np.array([[0.0, 0, 40, 40], [100, 0, 300, 200]])
    area = np.array([1600.0, 40000])
    truth = Instances(
        boxes=true,
        labels=np.array([1, 1]),
        masks=rectangles(true, SIZE),
        area=area,
        crowd=np.array([False, crowd]),
    )
    said = np.array(found, dtype=np.float64)
    scores = np.linspace(1, 0.9, len(said))
    labels = np.ones(len(said), dtype=np.int64)
    return Made(
        [truth],
        [Found(boxes=said, labels=labels, masks=rectangles(said, SIZE), scores=scores)],
    )


def test_what_lies_in_a_crowd_is_ignored() -> None:
    inside = ((110.0, 10, 150, 50), (160.0, 60, 200, 100), (0.0, 0, 40, 40))
    assert one_image(True, *inside).answers.scores()["box_ap"] == pytest.approx(1)
    wrong = one_image(False, *inside).answers.scores()["box_ap"]
    assert wrong is not None
    assert wrong < 0.5


def test_a_second_detection_of_an_instance_is_wrong() -> None:
    twice = one_image(True, (0, 0, 40, 40), (1, 1, 40, 40), (110, 10, 150, 50)).answers
    assert twice.scores()["box_ap"] == pytest.approx(1)  # wrong, but after the right one
    ants = twice.ranked("box")[0]
    assert ants.right[0].tolist() == [True, False, False]
    assert ants.counted[0].tolist() == [True, True, False]


def test_at_most_100_detections_of_a_class_count() -> None:
    sample = one_image(True, *[(200.0, 200, 220, 220)] * 120, (0, 0, 40, 40))
    assert len(sample.answers.found["image"]) == 100
    assert sample.answers.scores()["box_ap"] == 0


def test_bits_come_back() -> None:
    flags = np.random.default_rng(0).random((len(AREAS), len(THRESHOLDS), 9)) < 0.5
    for i, area in enumerate(AREAS):
        assert np.array_equal(unpacked(packed(flags), area), flags[i])


def test_masks_overlap_as_masks() -> None:
    sample = one_image(True, (0, 0, 40, 40))
    half = np.zeros((1, *SIZE), dtype=np.uint8)
    half[0, :40, :20] = 1
    found = replace(sample.found[0], masks=encoded(half))
    _, bits = matched(sample.truth[0], found)
    assert unpacked(bits["box_matched"], "all").all()
    assert unpacked(bits["mask_matched"], "all")[:, 0].tolist() == [True] + [False] * 9


def test_stored_answers_come_back() -> None:
    answers, other = made(9).answers, made(9, seed=1).answers
    stored = {**answers.shared(), **answers.arrays("last"), **answers.arrays("best")}
    data: Any = type("Data", (), {"classes": CLASSES})
    again = ANSWERS.read(stored, "best", data)
    assert again.scores() == answers.scores()
    assert again.same_truth(answers)
    assert not again.same_truth(other)


def test_two_models_are_compared_on_the_same_draws() -> None:
    sample = made(25)
    better = [
        replace(each, scores=np.where(each.labels == 1, each.scores, each.scores / 2))
        for each in sample.found
    ]
    worse = [each.chosen(np.arange(0, len(each.labels), 2)) for each in sample.found]
    a, b = (Made(sample.truth, each).answers for each in (better, worse))
    task = get_task("detection")
    found = over_resamples({0: a}, {0: b}, score=task.score, unit="image")
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.difference <= found.high
    assert found == ANSWERS.interval(task, {0: a}, {0: b})
    draws = a.score(resamples(25)) - b.score(resamples(25))
    assert found.low == pytest.approx(np.quantile(draws[np.isfinite(draws)], 0.025))
    same = over_resamples({0: a}, {0: a}, score=task.score, unit="image")
    assert same is not None
    assert (same.low, same.p) == (None, None)
    with pytest.raises(ValueError, match="image"):
        over_resamples({0: a}, {0: made(25, seed=2).answers}, score=task.score, unit="image")


def test_intervals_of_the_report_are_around_the_scores() -> None:
    answers = made(25).answers
    ends, scores = intervals([answers]), answers.scores()
    assert {*ends} == {f"{shape}_{key}" for shape in SHAPES for key in KEYS[:3]}
    for key, each in ends.items():
        value = scores[key]
        assert value is not None
        assert each[0] < value < each[1]
