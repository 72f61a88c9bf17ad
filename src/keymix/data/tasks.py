# SPDX-License-Identifier: Apache-2.0
"""The tasks that data set a model, and how each is scored. Reading this costs no heavy import.

A run's or a comparison's record names its task by the key ``task``; one without it classifies.
"""

from __future__ import annotations

from dataclasses import dataclass

from keymix.task import get_task

BACKGROUND = "background"
"""Name of the class of exclusive masks that no mean over classes counts."""
IGNORE = 255
"""Value of a mask's pixels that neither train nor count."""


CLASSIFICATION = get_task("classification")
SEGMENTATION = get_task("segmentation")


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
