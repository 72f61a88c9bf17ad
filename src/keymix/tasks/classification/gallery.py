# SPDX-License-Identifier: Apache-2.0
"""Test images in pictures: on which mixers disagree, and of which they were most wrongly certain.

What a mixer answers is what most of its seeds do. No model runs: all is in the runs' answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keymix.analysis.answers import FloatArray, IntArray
from keymix.report.formats import percent
from keymix.report.gallery import Gallery, Panel, Scene
from keymix.report.pictures import image_uri

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.classification.answers import ClassAnswers

PICTURES = 12
"""Test images of each gallery at most."""


@dataclass(frozen=True, kw_only=True)
class Consensus:
    """What most seeds of a mixer answer to each image ``[N]``, and how probable they find it."""

    answer: IntArray
    probability: FloatArray

    @classmethod
    def of(cls, runs: Sequence[ClassAnswers]) -> Consensus:
        """Take the vote of some runs; a tie goes to the more probable answer, then the first seed.

        The probability is the mean over the seeds that gave the answer.
        """
        said = np.stack([run.predicted for run in runs])
        sure = np.stack([run.confidence for run in runs]).astype(np.float64)
        same = said[:, None] == said[None]
        votes, total = same.sum(axis=1), (same * sure[None]).sum(axis=1)
        winner = (votes + total / (2 * len(runs))).argmax(axis=0)
        images = np.arange(said.shape[1])
        return cls(answer=said[winner, images], probability=(total / votes)[winner, images])


def most_disputed(answers: IntArray, target: IntArray, number: int) -> list[int]:
    """Choose images on which mixers disagree, answers ``[M, N]``: the most balanced ones.

    An image is the more disputed, the more pairs of mixers answer differently. The most disputed
    of each class come first, then the second ones, ….
    """
    pairs = (answers[:, None] != answers[None]).sum(axis=(0, 1))
    ranked = sorted(np.flatnonzero(pairs).tolist(), key=lambda i: (-int(pairs[i]), i))
    seen: dict[int, int] = {}
    rounds: list[tuple[int, int]] = []
    for place, i in enumerate(ranked):
        of_class = int(target[i])
        rounds.append((seen.get(of_class, 0), place))
        seen[of_class] = seen.get(of_class, 0) + 1
    return [ranked[place] for _, place in sorted(rounds)[:number]]


def surest_errors(found: Sequence[Consensus], target: IntArray, number: int) -> list[int]:
    """Choose images to which a mixer's wrong answer was most probable, the most probable first."""
    highest = np.zeros(len(target))
    for each in found:
        highest = np.maximum(highest, np.where(each.answer != target, each.probability, 0))
    ranked = np.argsort(-highest, kind="stable")[:number]
    return [int(i) for i in ranked if highest[i] > 0]


def draw(data: ImageData, tested: Mapping[str, Sequence[ClassAnswers]]) -> dict[str, Gallery]:
    """Draw the galleries of some mixers' runs, without those that have no image to show."""
    if not tested:
        return {}
    found = {mixer: Consensus.of(runs) for mixer, runs in tested.items()}
    every = [run for runs in tested.values() for run in runs]
    target, index = every[0].target, every[0].index
    answers = np.stack([each.answer for each in found.values()])
    about = {
        "mixers": len(found),
        "seeds": max(len(each) for each in tested.values()),
        "disputed": int((answers != answers[:1]).any(axis=0).sum()),
    }

    def scene(i: int) -> Scene:
        place, true = int(index[i]), int(target[i])
        pixels = data.test.picture(place).numpy()
        panels = [Panel(text=every[0].classes[true]), *_camps(found, i, true, every[0].classes)]
        return Scene(
            id=data.test.ids(place),
            picture=image_uri(pixels),
            size=(pixels.shape[1], pixels.shape[2]),
            panels=tuple(panels),
        )

    chosen = {
        "disagreements": most_disputed(answers, target, PICTURES),
        "errors": surest_errors(list(found.values()), target, PICTURES),
    }
    return {
        name: Gallery(scenes=tuple(map(scene, images)), about=about)
        for name, images in chosen.items()
        if images
    }


def _camps(
    found: Mapping[str, Consensus], i: int, true: int, classes: Sequence[str]
) -> list[Panel]:
    """Put mixers with one answer together, each with its probability; the commonest comes first."""
    camps: dict[int, dict[str, str]] = {}
    for mixer, each in found.items():
        text = f"{percent(float(each.probability[i]), 0)}\u00a0%"
        camps.setdefault(int(each.answer[i]), {})[mixer] = text
    ordered = sorted(camps.items(), key=lambda camp: -len(camp[1]))
    return [
        Panel(mixers=mixers, text=classes[answer], right=answer == true)
        for answer, mixers in ordered
    ]
