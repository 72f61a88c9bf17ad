# SPDX-License-Identifier: Apache-2.0
"""The tasks that data set a model, and how each is scored. Reading this costs no heavy import.

A run's or a comparison's record names its task by the key ``task``; one without it classifies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keymix.errors import UserError

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


def task_of(record: Mapping[str, Any]) -> TaskKind:
    """Return the task of a record: a comparison's, a run's summary, or that of data.

    Args:
        record: What tells it by ``task``, itself or in its ``data``.

    Raises:
        UserError: If this keymix has no such task.
    """
    data = record.get("data")
    inside = data if isinstance(data, Mapping) else {}
    name = record.get("task", inside.get("task", CLASSIFICATION.name))
    if name not in TASKS:
        raise UserError(f"task {name!r} is unknown to this keymix; it has {', '.join(TASKS)}.")
    return TASKS[name]


def scored_classes(record: Mapping[str, Any]) -> list[int]:
    """Return the classes over which scores are averaged: all but the background of masks.

    Args:
        record: That of data: ``classes``, and ``task`` where it is not classification.
    """
    names = list(record["classes"])
    whole = task_of(record) is not SEGMENTATION or record.get("multilabel", False)
    return [i for i, name in enumerate(names) if whole or name != BACKGROUND]
