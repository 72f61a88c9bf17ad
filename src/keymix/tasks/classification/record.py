# SPDX-License-Identifier: Apache-2.0
"""What the record of a comparison keeps of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keymix.report.record import Sparse


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that count, and how many test images have each; None if no run is finished."""

    names: tuple[str, ...]
    test_images: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """How often a class was taken for another, by their numbers, over all seeds."""

    true: int
    predicted: int
    count: int


@dataclass(frozen=True, kw_only=True)
class OfRun(Sparse):
    """What is kept of a finished run, last epoch, test split.

    Args:
        correct: Right and wrong by image: base64 of bits, the first in the highest bit.
        class_correct: Number of images of each class that are right.
    """

    correct: str | None = None
    class_correct: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """What is kept of a comparison.

    Args:
        classes: The classes.
        confusions: The most frequent, by mixer's label.
    """

    classes: Classes
    confusions: Mapping[str, tuple[Confusion, ...]] | None = None
