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
from keymix.report.pictures import TINY, check_pictures, image_uri
from keymix.report.record import ComparisonRecord, Said, Sparse

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.classification.answers import ClassAnswers

PICTURES = 12
"""Test images of each gallery at most."""


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a mixer answered to an image, the class's number, and its probability; None if unknown.

    The probability is a mean over seeds.
    """

    answer: int
    probability: float | None


@dataclass(frozen=True, kw_only=True)
class GalleryImage:
    """A test image: a data URI, where it is from, its class, and the answers by mixer's label."""

    png: str
    id: str
    true: int
    answers: Mapping[str, Answered]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The test images to look at.

    `mixers` are those that chose them, and `seeds` of each were at most asked. Of all test images
    `disputed` are those on which two mixers disagree. `at_least` says that probabilities are lower
    bounds: seeds that predict another class are not known.
    """

    mixers: tuple[str, ...]
    seeds: int
    disputed: int
    at_least: bool
    disagreements: tuple[GalleryImage, ...]
    errors: tuple[GalleryImage, ...]


@dataclass(frozen=True, kw_only=True)
class OfPictures(Sparse):
    """What is kept of the models' answers in pictures."""

    gallery: Gallery | None = None


# ---- how it is made --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Consensus:
    """What most seeds of a mixer answer to each image ``[N]``, and its probability, if known."""

    answer: IntArray
    probability: FloatArray | None

    @classmethod
    def of(cls, runs: Sequence[ClassAnswers]) -> Consensus:
        """Take the vote of some runs; a tie goes to the more probable answer, then the first seed.

        Where only the probability of the prediction is known, seeds that predict another class
        count as 0.
        """
        said = np.stack([run.predicted for run in runs])
        votes = (said[:, None] == said[None]).sum(axis=1).astype(np.float64)
        shares = _probabilities(runs, said)
        winner = (votes if shares is None else votes + shares / 2).argmax(axis=0)
        images = np.arange(said.shape[1])
        return cls(
            answer=said[winner, images],
            probability=None if shares is None else shares[winner, images],
        )


def _probabilities(runs: Sequence[ClassAnswers], said: IntArray) -> FloatArray | None:
    """Return the mean over seeds of the probability of each seed's answer, ``[S, N]``."""
    shares = [run.probabilities for run in runs]
    if all(each is not None for each in shares):
        every = np.mean([np.asarray(each, dtype=np.float64) for each in shares], axis=0)
        found: FloatArray = every[np.arange(said.shape[1]), said]
        return found
    sure = [run.confidence for run in runs]
    if any(each is None for each in sure):
        return None
    certain = np.stack([np.asarray(each, dtype=np.float64) for each in sure])
    same = said[:, None] == said[None]
    mean: FloatArray = (same * certain[None]).mean(axis=1)
    return mean


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
        if each.probability is not None:
            wrong = each.answer != target
            highest = np.maximum(highest, np.where(wrong, each.probability, 0))
    ranked = np.argsort(-highest, kind="stable")[:number]
    return [int(i) for i in ranked if highest[i] > 0]


def draw(data: ImageData, tested: Mapping[str, Sequence[ClassAnswers]]) -> Gallery | None:
    """Draw the galleries of some mixers' runs; None where no image is worth a look."""
    found = {mixer: Consensus.of(runs) for mixer, runs in tested.items()}
    if not found:
        return None
    runs = next(iter(tested.values()))
    target, index = runs[0].target, runs[0].index
    answers = np.stack([each.answer for each in found.values()])
    disputed = most_disputed(answers, target, PICTURES)
    errors = surest_errors(list(found.values()), target, PICTURES)
    if not disputed and not errors:
        return None

    def drawn(i: int) -> GalleryImage:
        place = int(index[i])
        return GalleryImage(
            png=image_uri(data.test.picture(place).numpy()),
            id=data.test.ids(place),
            true=int(target[i]),
            answers={mixer: _answered(each, i) for mixer, each in found.items()},
        )

    several = any(len(each) > 1 for each in tested.values())
    return Gallery(
        mixers=tuple(found),
        seeds=max(len(each) for each in tested.values()),
        disputed=int((answers != answers[:1]).any(axis=0).sum()),
        at_least=several and any(run.probabilities is None for run in _all(tested)),
        disagreements=tuple(map(drawn, disputed)),
        errors=tuple(map(drawn, errors)),
    )


def _all(tested: Mapping[str, Sequence[ClassAnswers]]) -> list[ClassAnswers]:
    return [run for runs in tested.values() for run in runs]


def _answered(found: Consensus, i: int) -> Answered:
    share = found.probability
    return Answered(
        answer=int(found.answer[i]),
        probability=None if share is None else round(float(share[i]), 4),
    )


# ---- what the page shows ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Camp:
    """Mixers with one answer to an image: the answer, and each one's probability in words."""

    said: Said
    mixers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Card:
    """An image of the gallery, the end of where it is from, its class, and the answers.

    The commonest answer comes first.
    """

    image: GalleryImage
    name: str
    true: str
    camps: list[Camp]


@dataclass(frozen=True, kw_only=True)
class GalleryView:
    """The section of images: cards of both galleries; `tiny` says that images have few pixels."""

    stored: Gallery
    disagreements: list[Card]
    errors: list[Card]
    tiny: bool


def gallery_view(record: ComparisonRecord, names: Sequence[str]) -> GalleryView | None:
    """Make the cards; None without pictures. Only data URIs of images are taken."""
    stored = record.own.read(OfPictures).gallery
    if stored is None:
        return None
    check_pictures(image.png for image in (*stored.disagreements, *stored.errors))
    return GalleryView(
        stored=stored,
        disagreements=[_card(image, names) for image in stored.disagreements],
        errors=[_card(image, names) for image in stored.errors],
        tiny=max(record.data.image_size) <= TINY,
    )


def _card(image: GalleryImage, names: Sequence[str]) -> Card:
    camps: dict[int, dict[str, str]] = {}
    for mixer, answered in image.answers.items():
        share = answered.probability
        text = "" if share is None else f"{percent(share, 0)}\u00a0%"
        camps.setdefault(answered.answer, {})[mixer] = text
    ordered = sorted(camps.items(), key=lambda camp: -len(camp[1]))
    return Card(
        image=image,
        name=image.id.rpartition("/")[2],
        true=names[image.true],
        camps=[
            Camp(said=Said(text=names[answer], right=answer == image.true), mixers=mixers)
            for answer, mixers in ordered
        ],
    )
