# SPDX-License-Identifier: Apache-2.0
"""What a model answered on one split, as scores and intervals need it. NumPy only.

A task's score need not be a mean over images: a Jaccard index or an average precision is none. So
answers are asked for the score of a weighted set of units, the images or cases that chance is of,
from which a delete-one jackknife follows for any score.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from keymix.task import Score

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]

RESAMPLES = 1000
"""Bootstrap resamples: draws of all units, with replacement."""


def known(value: float) -> float | None:
    """Return a score as a number, None where it is not defined (NaN)."""
    return None if math.isnan(value) else float(value)


class Answers(ABC):
    """What one model answered on one split, inputs in the order of ``index``.

    ``index`` holds the positions of the inputs in the split, ``[N]``. Answers may be ragged: a task
    keeps them as it likes and says how they are stored.
    """

    index: IntArray
    imaginary: ClassVar[float] = 0.0
    """Added to the sum of squares of differences over units, 2 for Bonett and Price's two images"""

    @classmethod
    def of(cls, answers: Answers) -> Self:
        """Take answers as those of this class.

        Raises:
            TypeError: If they are not.
        """
        if not isinstance(answers, cls):
            raise TypeError(f"{type(answers).__name__} are no {cls.__name__}")
        return answers

    @property
    @abstractmethod
    def units(self) -> int:
        """Number of units of chance, U: images, or cases."""

    @abstractmethod
    def score(self, weights: FloatArray) -> FloatArray:
        """Score the split with weighted units, by the score that models are compared by.

        Args:
            weights: How often each unit counts; ones for the score of the split.

        Shape: ``[R, U]`` -> ``[R]``, NaN where the score is not defined.
        """

    def unit_values(self) -> FloatArray:
        r"""Return a value for each unit, such that their mean has the standard error of the score.

        The pseudo-values of the delete-one jackknife, :math:`U\,s - (U - 1)\,s_{(u)}` with the
        score :math:`s` of all units and :math:`s_{(u)}` without one. Where the score is a mean over
        units, they are the values it is the mean of.

        Shape: ``[U]``.
        """
        units = self.units
        if units < 2:
            return np.full(units, whole(self))
        return units * whole(self) - (units - 1) * without_each(self)

    @cached_property
    def resampled(self) -> FloatArray:
        """Score units drawn with replacement, as many as there are, `RESAMPLES` times.

        Shape: ``[RESAMPLES]``, NaN where the score of a draw is not defined.
        """
        return self.score(resamples(self.units))

    @abstractmethod
    def shared(self) -> Arrays:
        """What is the same whatever weights answered, as arrays to store, ``index`` included."""

    @abstractmethod
    def arrays(self, which: str) -> Arrays:
        """The answers as arrays to store.

        Args:
            which: Weights of the ``last`` or the ``best`` epoch, a prefix of the arrays' names.
        """

    @abstractmethod
    def same_truth(self, other: Answers) -> bool:
        """Whether other answers are to the same questions."""

    def degenerate(self) -> tuple[str, ...]:
        """Name what makes the answers say nothing of a model, such as one answer for all images.

        Each is a clause in which ``{inputs}`` stands for what was answered, such as
        ``200 {inputs} got the same answer`` for ``200 test images got the same answer``.
        """
        return ()

    def unscorable(self) -> str:
        """Say why the truth allows no score, a clause likewise; nothing if it does."""
        return ""


def resamples(units: int) -> FloatArray:
    """Draw units with replacement, as many as there are: how often each comes in each draw.

    The draws are the same for all answers of as many units, so that two models are paired.

    Shape: ``[RESAMPLES, U]``.
    """
    random = np.random.default_rng(units)
    shares = np.full(units, 1 / max(1, units))
    return random.multinomial(units, shares, size=RESAMPLES).astype(np.float64)


def whole(answers: Answers) -> float:
    """Return the score of all units."""
    return float(answers.score(np.ones((1, answers.units)))[0])


def without_each(answers: Answers) -> FloatArray:
    """Return the scores without each unit in turn, ``[U]``."""
    units = answers.units
    return answers.score(np.ones((units, units)) - np.eye(units))


def bounded(score: Score, low: float, high: float) -> tuple[float, float]:
    """Cut an interval of a difference of scores to what differences can be."""
    if score.low is None or score.high is None:
        return low, high
    most = score.high - score.low
    return max(-most, low), min(most, high)
