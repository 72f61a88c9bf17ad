# SPDX-License-Identifier: Apache-2.0
"""What trained runs answered to every test image: right or wrong, class by class, mix-ups."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keymix.data.record import DataRecord
from keymix.report.record import Confusion

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

CONFUSIONS = 10
"""At most so many mix-ups are told for a mixer."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one run answered, test images in the order of their index.

    Args:
        target: True class numbers, ``[N]``.
        predicted: Class numbers said with the weights of the ``last`` and the ``best`` epoch.
    """

    target: IntArray
    predicted: dict[str, IntArray]

    def correct(self, which: str) -> BoolArray:
        """Whether each image was right, ``[N]``."""
        right: BoolArray = self.predicted[which] == self.target
        return right


def read_answers(path: Path, data: DataRecord) -> Answers:
    """Read a run's predictions.

    Args:
        path: The run's ``predictions_test.npz``.
        data: Its record of the data.

    Raises:
        UserError: If the file is missing or damaged.
    """
    from keymix.train.damage import read_predictions

    stored = read_predictions(path, data)
    predicted = {which: stored[f"{which}_pred"] for which in ("last", "best")}
    return Answers(target=stored["target"], predicted=predicted)


def packed(correct: BoolArray) -> str:
    """Write right and wrong as base64 of one bit an image, the first in the highest bit."""
    return base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")


def counts(labels: IntArray, num_classes: int) -> tuple[int, ...]:
    """Count the images of each class."""
    return tuple(np.bincount(labels, minlength=num_classes).tolist())


def confusions(runs: Iterable[Answers], *, which: str = "last") -> tuple[Confusion, ...]:
    """List the mix-ups that happened most often over some runs, the commonest first.

    Args:
        runs: Answers of one mixer's runs.
        which: Weights of the ``last`` or the ``best`` epoch.
    """
    seen: Counter[tuple[int, int]] = Counter()
    for run in runs:
        wrong = ~run.correct(which)
        pairs = np.stack([run.target[wrong], run.predicted[which][wrong]], axis=1)
        kinds, times = np.unique(pairs, axis=0, return_counts=True)
        for (true, said), number in zip(kinds.tolist(), times.tolist(), strict=True):
            seen[true, said] += number
    ordered = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        Confusion(true=true, predicted=said, count=number)
        for (true, said), number in ordered[:CONFUSIONS]
    )
