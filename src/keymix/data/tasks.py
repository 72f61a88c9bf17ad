# SPDX-License-Identifier: Apache-2.0
"""The tasks that data set a model, and how each is scored. Reading this costs no heavy import.

A run's or a comparison's record names its task by the key ``task``; one without it classifies.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKGROUND = "background"
"""Name of the class of exclusive masks that no mean over classes counts."""
IGNORE = 255
"""Value of a mask's pixels that neither train nor count."""


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """A task, and the score by which its models are compared.

    Args:
        name: ``classification`` or ``segmentation``.
        score: Key of the score in records, such as ``top1``; a fraction, more is better.
        told: The score in a sentence or over an axis, such as ``accuracy``.
        short: The score at the head of a column, such as ``top-1``.
        scores: Keys of all scores of an evaluation, in the order they are told, the loss first.
    """

    name: str
    score: str
    told: str
    short: str
    scores: tuple[str, ...]


CLASSIFICATION = TaskKind(
    name="classification",
    score="top1",
    told="accuracy",
    short="top-1",
    scores=("loss", "top1", "top5"),
)
SEGMENTATION = TaskKind(
    name="segmentation",
    score="jaccard",
    told="mean Jaccard index",
    short="Jaccard",
    scores=("loss", "jaccard", "weighted_jaccard", "dice"),
)
TASKS = {kind.name: kind for kind in (CLASSIFICATION, SEGMENTATION)}


@dataclass(frozen=True, kw_only=True)
class MaskKind:
    """What the masks of a set are.

    Args:
        multilabel: Whether a pixel may belong to several classes, or to none: the model answers
            with one logit a class, each for itself. Otherwise a pixel has one class.
        background: Number of the class ``background`` of exclusive masks, which no mean over
            classes counts; None where there is none.
    """

    multilabel: bool
    background: int | None
