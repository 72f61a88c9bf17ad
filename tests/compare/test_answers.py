# SPDX-License-Identifier: Apache-2.0
"""Which class was taken for which, counted over runs; and which images attention is shown on."""

from __future__ import annotations

from typing import Any

import numpy as np

from keymix.data.record import DataRecord
from keymix.records import Own, to_json
from keymix.report.part import RunAnswers
from keymix.tasks.classification.answers import ClassAnswers
from keymix.tasks.classification.page import CONFUSIONS, PAGE, spread_out

DATA = DataRecord(
    spec="folder:a",
    classes=("a", "b", "c"),
    image_size=(4, 4),
    in_chans=1,
    mean=(0.5,),
    std=(0.5,),
    crop_pct=1.0,
    cached=True,
    task="classification",
    sizes={"train": 1, "val": 1, "test": 4},
    index_sha256=dict.fromkeys(("train", "val", "test"), ""),
    fingerprint="",
)


def answered(target: list[int], predicted: list[int]) -> RunAnswers:
    answers = ClassAnswers(
        index=np.arange(len(target)),
        target=np.array(target),
        predicted=np.array(predicted),
        top5=np.ones(len(target), dtype=bool),
        confidence=np.ones(len(target), dtype=np.float16),
        classes=("a", "b", "c"),
    )
    return RunAnswers(mixer="softmax", answers=answers, details=Own())


def kept(runs: list[RunAnswers]) -> Any:
    return to_json(PAGE.keep_comparison(runs, DATA))


def test_confusions_name_the_true_class_first_and_the_commonest_pair_on_top() -> None:
    runs = [answered([0, 1, 1, 2], [2, 1, 0, 2]), answered([0, 1, 1, 2], [2, 1, 1, 1])]
    found = kept(runs)
    assert found["confusions"]["softmax"] == [
        {"true": "a", "predicted": "c", "count": 2, "share": 1.0},
        {"true": "b", "predicted": "a", "count": 1, "share": 0.25},
        {"true": "c", "predicted": "b", "count": 1, "share": 0.5},
    ]
    assert found["classes"]["test_images"] == [1, 2, 1]
    right = [answered([0, 1], [0, 1])]
    assert kept(right)["confusions"] == {"softmax": []}


def test_a_few_of_many_confusions_are_kept() -> None:
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b] * 2
    runs = [answered([a for a, _ in pairs], [b for _, b in pairs])]
    assert len(kept(runs)["confusions"]["softmax"]) == 6 < CONFUSIONS


def test_attention_is_shown_on_images_of_different_classes() -> None:
    assert spread_out([2, 2, 1, 0, 1], 3) == [3, 2, 0]
    assert spread_out([1, 1, 1], 2) == [0, 1]
    assert PAGE.chosen(answered([2, 2, 1, 0], [0, 0, 0, 0]).answers, 2) == [3, 2]
