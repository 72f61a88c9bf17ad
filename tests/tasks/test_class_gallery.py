# SPDX-License-Identifier: Apache-2.0
"""Which test images the report of classes shows, and its cards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keymix.errors import UserError
from keymix.records import from_json, to_json
from keymix.report.record import ComparisonRecord, opened
from keymix.tasks.classification.answers import ClassAnswers
from keymix.tasks.classification.gallery import (
    Consensus,
    Gallery,
    draw,
    gallery_view,
    most_disputed,
    surest_errors,
)

NAMES = ("ant", "bee", "cat")


def run(
    predicted: list[int], sure: list[float], target: list[int], *, stored: str = "all"
) -> ClassAnswers:
    """Make a run of three classes; what is not predicted shares the rest equally."""
    images = np.arange(len(target))
    shares = np.repeat((1 - np.array(sure))[:, None] / 2, 3, axis=1)
    shares[images, predicted] = sure
    return ClassAnswers(
        index=images,
        target=np.array(target),
        predicted=np.array(predicted),
        top5=None,
        classes=NAMES,
        confidence=None if stored == "none" else np.array(sure, dtype=np.float16),
        probabilities=shares.astype(np.float16) if stored == "all" else None,
    )


def test_most_seeds_decide_and_probabilities_are_means_over_them() -> None:
    target = [0, 0]
    found = Consensus.of(
        [
            run([1, 0], [0.5, 0.9], target),
            run([1, 2], [0.5, 0.8], target),
            run([0, 2], [1.0, 0.5], target),
        ]
    )
    assert found.answer.tolist() == [1, 2]
    assert found.probability is not None
    assert found.probability == pytest.approx([1 / 3, (0.05 + 0.8 + 0.5) / 3], abs=1e-3)


def test_of_two_answers_the_more_probable_counts_and_then_the_first_seed_s() -> None:
    two = [run([1, 1], [0.5, 0.5], [0, 0]), run([2, 2], [0.9, 0.5], [0, 0])]
    assert Consensus.of(two).answer.tolist() == [2, 1]


def test_of_many_classes_a_seed_with_another_answer_counts_as_0() -> None:
    seeds = [([1], [0.6]), ([1], [0.9]), ([2], [0.9])]
    found = Consensus.of([run(*each, [0], stored="confidence") for each in seeds])
    assert found.answer.tolist() == [1]
    assert found.probability == pytest.approx([0.5], abs=1e-3)
    assert Consensus.of([run(*each, [0], stored="none") for each in seeds]).probability is None


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


def gallery() -> Gallery:
    found = draw(photos(4), TESTED)
    assert found is not None
    return found


def test_a_gallery_is_drawn_and_stored_as_it_was() -> None:
    found = gallery()
    assert (found.mixers, found.seeds, found.disputed) == (("softmax", "static_key"), 2, 1)
    assert [image.id for image in found.disagreements] == ["/far/away/2.png"]
    assert [image.id for image in found.errors] == ["/far/away/3.png", "/far/away/2.png"]
    assert not found.at_least
    again = from_json(Gallery, json.loads(json.dumps(to_json(found))), where="it")
    assert again == found


def test_mixers_that_agree_and_are_right_leave_nothing_to_show() -> None:
    right = run([0, 1, 2, 0], [0.9] * 4, TARGET)
    assert draw(photos(4), {"softmax": [right], "static_key": [right]}) is None
    assert draw(photos(4), {}) is None


def record_with(found: Gallery) -> ComparisonRecord:
    stored = Path(__file__).parents[2] / "docs/results/cifar10-20-epochs/results.json"
    values = json.loads(stored.read_text(encoding="utf-8"))
    return opened({**values, "gallery": to_json(found)}, where="it")


def test_a_card_has_a_camp_for_each_answer_with_its_mixers() -> None:
    view = gallery_view(record_with(gallery()), NAMES)
    assert view is not None
    (card,) = view.disagreements
    assert (card.true, card.name) == ("cat", "2.png")
    assert [(camp.said.text, camp.said.right, [*camp.mixers]) for camp in card.camps] == [
        ("cat", True, ["softmax"]),
        ("bee", False, ["static_key"]),
    ]
    assert card.camps[0].mixers == {"softmax": "90\u00a0%"}
    assert view.tiny


def test_what_is_no_picture_is_refused() -> None:
    values = to_json(gallery())
    values["errors"][0]["png"] = "https://elsewhere/x.png"
    with pytest.raises(UserError, match="gallery"):
        gallery_view(record_with(from_json(Gallery, values, where="it")), NAMES)
