# SPDX-License-Identifier: Apache-2.0
"""What trained runs answered where images have masks: how well each class of each image overlaps.

A stored overlap is base64 of little-endian uint16, `SHARES` for a Jaccard index of 1.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keymix.analysis import overlap
from keymix.analysis.statistics import by_case
from keymix.data.record import DataRecord
from keymix.report.views.payload import SHARES

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MaskAnswers:
    """What one run answered, test images in the order of their index.

    Args:
        group: The case of each image, ``[N]``.
        counts: Pixels shared, predicted and true of each image and class, ``[N, K, 3]``, with the
            weights of the ``last`` and the ``best`` epoch.
        scored: Numbers of the classes that count.
    """

    group: IntArray
    counts: dict[str, IntArray]
    scored: tuple[int, ...]

    @property
    def truth(self) -> IntArray:
        """True pixels of the classes that count, ``[N, C]``."""
        true: IntArray = self.counts["last"][:, list(self.scored), 2]
        return true

    def cases(self, which: str) -> IntArray:
        """Pixels of each case, ``[G, K, 3]``."""
        return by_case(self.counts[which], self.group)

    def images(self, which: str) -> FloatArray:
        """Mean Jaccard index of each image, ``[N]``; 1 where nothing is and nothing is found."""
        return overlap.mean_jaccard(self.counts[which], self.scored)


def read_mask_answers(path: Path, data: DataRecord) -> MaskAnswers:
    """Read a run's predictions.

    Args:
        path: The run's ``predictions_test.npz``.
        data: Its record of the data.

    Raises:
        UserError: If the file is missing or damaged.
    """
    from keymix.train.damage import read_predictions

    stored = read_predictions(path, data)
    return MaskAnswers(
        group=stored["group"],
        counts={which: stored[f"{which}_counts"] for which in ("last", "best")},
        scored=data.scored_classes,
    )


def packed(shares: FloatArray) -> str:
    """Write numbers from 0 to 1 as the module's head says."""
    levels = np.round(np.clip(shares, 0.0, 1.0) * SHARES).astype("<u2")
    return base64.b64encode(levels.tobytes()).decode("ascii")


def spread_over_cases(answers: MaskAnswers, number: int) -> list[int]:
    """Choose images evenly over the cases that have something in them, of each its fullest.

    The choice is fixed by the data alone. It falls on the first images where no image has anything.

    Args:
        answers: Of any run: what is true is the same in all.
        number: At most so many.
    """
    ranked = _fullest(answers, number)
    cases = sorted(i for i in ranked[0]) if ranked else []
    if len(cases) >= number:
        return [cases[i * len(cases) // number] for i in range(number)]
    chosen = [*cases, *(i for later in ranked[1:] for i in later)]
    spare = (i for i in range(len(answers.group)) if i not in chosen)
    while len(chosen) < min(number, len(answers.group)):
        chosen.append(next(spare))
    return chosen[:number]


def telling(answers: MaskAnswers, number: int) -> list[int]:
    """Choose the images that show most: the fullest of different cases, and one that is empty.

    Args:
        answers: Of any run: what is true is the same in all.
        number: At most so many.
    """
    area = answers.truth.sum(axis=1)
    empty = np.flatnonzero(area == 0)[:1].tolist()
    full = [i for later in _fullest(answers, number) for i in later]
    return [*full[: number - len(empty)], *empty]


def _fullest(answers: MaskAnswers, number: int) -> list[list[int]]:
    """Rank images that have something: of each case the fullest, then the farthest from it, ….

    Returns:
        One list a round, in each the fullest first; together no more rounds than are needed for
        `number` images.
    """
    area = answers.truth.sum(axis=1)
    left: dict[int, list[int]] = {}
    for i in np.flatnonzero(area > 0).tolist():
        left.setdefault(int(answers.group[i]), []).append(i)
    taken: dict[int, list[int]] = {case: [] for case in left}
    rounds: list[list[int]] = []
    while any(left.values()) and sum(map(len, rounds)) < number:
        found = []
        for case, images in left.items():
            if not images:
                continue
            best = max(images, key=lambda i: (_apart(i, taken[case]), int(area[i]), -i))
            images.remove(best)
            taken[case].append(best)
            found.append(best)
        rounds.append(sorted(found, key=lambda i: (-int(area[i]), i)))
    return rounds


def _apart(image: int, others: Sequence[int]) -> int:
    return min((abs(image - other) for other in others), default=0)
