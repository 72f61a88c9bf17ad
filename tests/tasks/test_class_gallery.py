# SPDX-License-Identifier: Apache-2.0
"""Which test images the report of classes shows, and its cards."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keymix.records import from_json, to_json
from keymix.report.gallery import Gallery
from keymix.tasks.classification.answers import ClassAnswers
from keymix.tasks.classification.gallery import Consensus, draw, most_disputed, surest_errors

NAMES = ("ant", "bee", "cat")


def run(predicted: list[int], sure: list[float], target: list[int]) -> ClassAnswers:
    """Make a run of three classes."""
    return ClassAnswers(
        index=np.arange(len(target)),
        target=np.array(target),
        predicted=np.array(predicted),
        top5=np.ones(len(target), dtype=bool),
        confidence=np.array(sure, dtype=np.float16),
        classes=NAMES,
    )


def test_most_seeds_decide_and_the_probability_is_the_mean_over_them() -> None:
    target = [0, 0]
    found = Consensus.of(
        [
            run([1, 0], [0.5, 0.9], target),
            run([1, 2], [0.5, 0.8], target),
            run([0, 2], [1.0, 0.5], target),
        ]
    )
    assert found.answer.tolist() == [1, 2]
    assert found.probability == pytest.approx([0.5, 0.65], abs=1e-3)


def test_of_two_answers_the_more_probable_counts_and_then_the_first_seed_s() -> None:
    two = [run([1, 1], [0.5, 0.5], [0, 0]), run([2, 2], [0.9, 0.5], [0, 0])]
    assert Consensus.of(two).answer.tolist() == [2, 1]


def test_the_most_balanced_disagreement_comes_first_spread_over_classes() -> None:
    target = np.array([0, 0, 0, 1, 1, 2])
    answers = np.array(
        [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 2], [0, 1, 2, 1, 1, 2], [0, 1, 2, 1, 2, 2]]
    )
    assert most_disputed(answers, target, 9) == [2, 4, 1]
    assert most_disputed(answers, target, 1) == [2]


def test_the_surest_errors_are_wrong_answers_of_the_highest_probability() -> None:
    target = np.array([0, 1, 2, 0])
    first = Consensus.of([run([1, 1, 2, 1], [0.5, 0.99, 0.99, 0.7], target.tolist())])
    second = Consensus.of([run([0, 0, 2, 0], [0.9, 0.95, 0.9, 0.9], target.tolist())])
    assert surest_errors([first, second], target, 9) == [1, 3, 0]
    assert surest_errors([first], target, 1) == [3]


def photos(count: int, side: int = 8) -> Any:
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, side, side), generator=rng, dtype=torch.uint8)
    test = SimpleNamespace(picture=pixels.__getitem__, ids=lambda i: f"/far/away/{i}.png")
    return SimpleNamespace(test=test)


TARGET = [0, 1, 2, 0]
TESTED = {
    "softmax": [run([0, 1, 2, 1], [0.9, 0.9, 0.9, 0.8], TARGET)] * 2,
    "static_key": [run([0, 1, 1, 1], [0.9, 0.9, 0.6, 0.9], TARGET)],
}


def test_galleries_are_drawn_with_a_panel_for_each_answer() -> None:
    found = draw(photos(4), TESTED)
    disagreements, errors = found["disagreements"], found["errors"]
    assert [scene.id for scene in disagreements.scenes] == ["/far/away/2.png"]
    assert [scene.id for scene in errors.scenes] == ["/far/away/3.png", "/far/away/2.png"]
    assert disagreements.about == {"mixers": 2, "seeds": 2, "disputed": 1}
    true, *answers = disagreements.scenes[0].panels
    assert (true.text, true.mixers, disagreements.scenes[0].shown) == ("cat", {}, "2.png")
    assert [(panel.text, panel.right, panel.mixers) for panel in answers] == [
        ("cat", True, {"softmax": "90\u00a0%"}),
        ("bee", False, {"static_key": "60\u00a0%"}),
    ]
    again = from_json(Gallery, json.loads(json.dumps(to_json(errors))), where="it")
    assert again == errors


def test_mixers_that_agree_and_are_right_leave_nothing_to_show() -> None:
    right = run([0, 1, 2, 0], [0.9] * 4, TARGET)
    assert draw(photos(4), {"softmax": [right], "static_key": [right]}) == {}
    assert draw(photos(4), {}) == {}
