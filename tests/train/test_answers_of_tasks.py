# SPDX-License-Identifier: Apache-2.0
"""Answers of the built-in tasks: scored over weighted units, stored and read, compared, judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keymix.analysis import overlap, statistics
from keymix.analysis.answers import whole, without_each
from keymix.data import load
from keymix.data.record import DataRecord
from keymix.task import get_task
from keymix.tasks.classification.answers import ANSWERS, ClassAnswers
from keymix.tasks.segmentation.answers import ANSWERS as OF_MASKS
from keymix.tasks.segmentation.answers import MaskAnswers
from keymix.train.parts import answers_of
from made_masks import write_uwgi

RNG = np.random.default_rng(0)
N, K = 40, 4
SPLITS = ("train", "val", "test")
DATA = DataRecord(
    spec="digits",
    classes=("a", "b", "c", "d"),
    image_size=(12, 12),
    in_chans=1,
    mean=(0.5,),
    std=(0.5,),
    crop_pct=1.0,
    cached=True,
    task="classification",
    sizes=dict.fromkeys(SPLITS, N),
    index_sha256=dict.fromkeys(SPLITS, "a"),
    fingerprint="b",
)


def classes(seed: int, target: np.ndarray | None = None) -> ClassAnswers:
    rng = np.random.default_rng(seed)
    return ClassAnswers(
        index=np.arange(N),
        target=np.arange(N) % K if target is None else target,
        predicted=rng.integers(0, K, N),
        top5=np.ones(N, dtype=bool),
        confidence=np.ones(N, dtype=np.float16),
        classes=DATA.classes,
    )


def masks(seed: int) -> MaskAnswers:
    rng, truth = np.random.default_rng(seed), np.random.default_rng(99)
    true = truth.integers(0, 30, (N, K))
    predicted = rng.integers(0, 30, (N, K))
    common = (np.minimum(true, predicted) * rng.random((N, K))).astype(np.int64)
    return MaskAnswers(
        index=np.arange(N),
        group=np.arange(N) // 4,
        counts=np.stack([common, predicted, true], -1),
        surfaces=np.full((N, K, 2), np.nan),
        bins=np.ones((N, 15, 3)),
        classes=("background", "b", "c", "d"),
        scored=(1, 2, 3),
    )


def test_accuracy_is_the_weighted_share_of_right_answers() -> None:
    answers = classes(1)
    right = answers.correct
    assert answers.units == N
    assert whole(answers) == right.mean()
    for i, score in enumerate(without_each(answers)):
        assert score == pytest.approx(np.delete(right, i).mean())
    twice = np.ones((1, N))
    twice[0, :3] = 2
    assert answers.score(twice)[0] == pytest.approx((right.sum() + right[:3].sum()) / (N + 3))
    assert np.isnan(answers.score(np.zeros((1, N)))).all()


def test_the_jaccard_index_is_that_of_the_pooled_pixels_of_weighted_cases() -> None:
    answers = masks(1)
    assert answers.units == N // 4
    assert whole(answers) == overlap.mean_jaccard(answers.counts.sum(0), answers.scored)
    cases = answers.cases
    for i, score in enumerate(without_each(answers)):
        assert score == overlap.mean_jaccard(np.delete(cases, i, 0).sum(0), answers.scored)
    weights = RNG.integers(0, 3, (5, answers.units)).astype(np.float64)
    for row, score in zip(weights, answers.score(weights), strict=True):
        drawn = np.repeat(cases, row.astype(int), axis=0)
        assert score == overlap.mean_jaccard(drawn.sum(0), answers.scored)


def test_intervals_are_those_of_the_closed_forms() -> None:
    ours, theirs = {s: classes(s) for s in range(3)}, {s: classes(s + 9) for s in range(3)}
    right = [{s: each.correct for s, each in runs.items()} for runs in (ours, theirs)]
    found = ANSWERS.interval(get_task("classification"), ours, theirs)
    assert found == statistics.over_images(*right)
    first, second = {s: masks(s) for s in range(3)}, {s: masks(s + 9) for s in range(3)}
    cases = [{s: each.cases for s, each in runs.items()} for runs in (first, second)]
    names = ("background", "b", "c", "d")
    found = OF_MASKS.interval(get_task("segmentation"), first, second)
    assert found == statistics.over_cases(*cases, (1, 2, 3), classes=names)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_stored_answers_come_back_in_the_order_of_their_index(task: str) -> None:
    part, data = answers_of(get_task(task)), DATA
    last, best = (classes(1), classes(2)) if task == "classification" else (masks(1), masks(2))
    if task == "segmentation":
        data = replace(DATA, task=task, multilabel=False, classes=("background", "b", "c", "d"))
    order = RNG.permutation(N)
    stored = {
        name: np.asarray(array)[order]
        for arrays in (last.shared(), last.arrays("last"), best.arrays("best"))
        for name, array in arrays.items()
    }
    for which, answers in (("last", last), ("best", best)):
        again = part.read(stored, which, data)  # type: ignore[arg-type]
        assert again.same_truth(answers)
        assert whole(again) == whole(answers)
        for name, array in answers.arrays(which).items():
            np.testing.assert_array_equal(again.arrays(which)[name], array)


def test_answers_to_other_questions_are_distinguished() -> None:
    assert classes(1).same_truth(classes(2))
    assert not classes(1).same_truth(classes(1, target=np.zeros(N, dtype=np.int64)))
    assert masks(1).same_truth(masks(2))
    assert not masks(1).same_truth(replace(masks(1), group=np.arange(N)))
    assert not masks(1).same_truth(classes(1))


def test_the_largest_class_is_a_reference() -> None:
    data = load("digits")
    reference = next(iter(answers_of(data.task).references(data)))
    found = reference.evaluated
    train, val, test = (each.labels.numpy() for each in data.splits)
    largest = np.bincount(train).argmax()
    assert reference.validated == (val == largest).mean()
    assert found.scores["top1"] == whole(found.answers) == (test == largest).mean()


@pytest.mark.parametrize("kind", ["exclusive", "multilabel"])
def test_the_commonest_class_of_each_pixel_is_a_reference(kind: str, tmp_path: Path) -> None:
    spec = f"uwgi:{write_uwgi(tmp_path)}"
    data = load(spec, image_size=24, test_fraction=0.3, val_fraction=0.3, masks=kind)
    (reference,) = answers_of(data.task).references(data)
    found = reference.evaluated
    train = np.stack([data.train.mask(i).numpy() for i in range(len(data.train))])
    planes = [train == k for k in range(len(data.classes))]
    if kind == "multilabel":
        mode: np.ndarray = (train.mean(0) > 0.5).astype(np.int64)
    else:
        mode = np.stack(planes).sum(1).argmax(0)
    test = np.stack([data.test.mask(i).numpy() for i in range(len(data.test))])
    counts = overlap.overlap_counts(
        np.broadcast_to(mode, test.shape),
        test,
        num_classes=len(data.classes),
        multilabel=kind == "multilabel",
    )
    scored = data.record().scored_classes
    assert found.scores["jaccard"] == overlap.mean_jaccard(counts.sum(0), scored)
    assert whole(found.answers) == found.scores["jaccard"]
