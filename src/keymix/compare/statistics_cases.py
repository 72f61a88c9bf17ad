# SPDX-License-Identifier: Apache-2.0
r"""How sure a difference in overlap is over test cases: a jackknife that leaves out one case each.

Slices of one scan look alike, and organs of one patient are hard in all of them: images of a case
are no independent witnesses, and an interval over images would be too narrow. So the unit is the
case. The score of a model is its pooled mean Jaccard index :math:`J`, that of the pixels of all
test images counted together, which is no mean over cases; hence the jackknife (Efron and Stein,
1981, doi:10.1214/aos/1176345462), that needs no formula for the variance of such a ratio.

With :math:`S` seeds that mixer :math:`a` and baseline :math:`b` have both finished and :math:`G`
cases, :math:`D` of all cases and :math:`D_{(g)}` of all but case :math:`g` are

.. math::

    D = \frac{1}{S} \sum_s \left(J_{a,s} - J_{b,s}\right), \qquad
    \mathrm{se}^2 = \frac{G - 1}{G} \sum_g \left(D_{(g)} - \bar D_{(\cdot)}\right)^2, \qquad
    D \pm t_{0.975,\,G-1}\, \mathrm{se}.

Like the interval over images of `keymix.compare.statistics` it is of the models as they were
trained. A class that is true in one case alone leaves no interval: without that case the class
drops out of the mean, or not, by one stray prediction. NumPy and SciPy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from keymix.analysis.overlap import mean_jaccard
from keymix.compare.statistics import LEVEL, SAME, Interval, tidy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

FEW_CASES = 20
"""Below so many test cases the interval is told to be rough."""


def by_case(counts: Counts, group: NDArray[np.int64]) -> Counts:
    """Add up the pixels of each case.

    Args:
        counts: Pixels shared, predicted and true of each image and class.
        group: The case of each image.

    Shape: ``[N, K, 3]``, ``[N]`` -> ``[G, K, 3]``, the cases in the order of their codes.
    """
    cases, place = np.unique(group, return_inverse=True)
    summed = np.zeros((len(cases), *counts.shape[1:]), dtype=np.int64)
    np.add.at(summed, place, counts)
    return summed


def over_cases(
    mixer: Mapping[int, Counts],
    baseline: Mapping[int, Counts],
    scored: Sequence[int],
    *,
    classes: Sequence[str],
) -> Interval | None:
    """Compare two mixers over the test cases, at the seeds that both have finished.

    Args:
        mixer: By seed, the pixels of each case of the mixer's model: shared, predicted, true.
        baseline: The same of the baseline, same cases in the same order.
        scored: Numbers of the classes that count.
        classes: Names of all classes, for what is told.

    Shape: each ``[G, K, 3]``.

    Returns:
        The interval of the module's head, without ends where cases tell no spread or a class that
        counts is true in one case alone, and ``None`` without a pair of runs.

    Raises:
        ValueError: If the runs were tested on different cases.
    """
    seeds = sorted(set(mixer) & set(baseline))
    if not seeds:
        return None
    truths = [runs[s][..., 2][:, list(scored)] for runs in (mixer, baseline) for s in seeds]
    if any(not np.array_equal(truths[0], other) for other in truths[1:]):
        raise ValueError("runs were tested on different cases")
    number = len(truths[0])
    if number == 0:
        return None
    pairs = [(mixer[s], baseline[s]) for s in seeds]
    whole, without = (
        np.mean([mean_jaccard(a, scored) - mean_jaccard(b, scored) for a, b in part], axis=0)
        for part in (
            [(a.sum(0), b.sum(0)) for a, b in pairs],
            [(a.sum(0) - a, b.sum(0) - b) for a, b in pairs],
        )
    )
    difference = tidy(float(whole))
    error = math.sqrt((number - 1) / number * float(np.square(without - without.mean()).sum()))
    cases_of = (truths[0] > 0).sum(axis=0)
    lonely = [classes[c] for c, cases in zip(scored, cases_of, strict=True) if cases == 1]
    note = ""
    if number < 2:
        note = "one case has no spread, so nothing can be said about other cases"
    elif lonely:
        alone = (
            f"{' and '.join(lonely)} {'is' if len(lonely) == 1 else 'are each'} in one test case"
        )
        note = f"{alone} alone, so nothing can be said of other cases"
    elif error <= SAME:
        note = "the difference is the same without any one case, so its spread cannot be estimated"
    if note:
        return Interval(n=number, difference=difference, low=None, high=None, p=None, note=note)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, number - 1)) * error
    rough = f"only {number} test cases, so the interval is rough"
    return Interval(
        n=number,
        difference=difference,
        low=max(-1.0, difference - half),
        high=min(1.0, difference + half),
        p=float(2 * stats.t.sf(abs(difference) / error, number - 1)),
        note=rough if number < FEW_CASES else "",
    )
