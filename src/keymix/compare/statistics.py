# SPDX-License-Identifier: Apache-2.0
r"""How sure a difference between two mixers is: over seeds, and over test images.

Two questions, two intervals. *Would it hold if the models were trained again?* is asked of the
seeds: the differences :math:`d_s = a_s - b_s` at shared seeds, their mean and Student's t interval
:math:`\bar d \pm t_{0.975,\,n-1}\, s_d / \sqrt n`. *Would it hold on more images?* is asked of the
test images, for the models as they were trained: :math:`x_i` is how often mixer minus baseline
gets image i right, averaged over seeds, and its mean gets an adjusted normal interval (Bonett and
Price, 2012, doi:10.1111/j.2044-8317.2011.02010.x): two imaginary images, one that only the mixer
and one that only the baseline gets right, join the sample. The closed form needs no random draws,
keeps its coverage when few images are in dispute, and has a width even when none is.

P-values of each question are corrected over the mixers by Holm's step-down method (1979).
Quantities are fractions (accuracy 0.93), not percentages. NumPy and SciPy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

LEVEL = 0.95
"""Confidence of every interval."""

SAME = 1e-7
"""Standard deviation of differences up to which they are the same: less than one image of ten
million, and more than the rounding of accuracies that were stored in single precision."""

VERDICT_SEEDS = 5
"""Pairs of runs from which on a verdict is given."""

Verdict = Literal["better", "worse", "no difference shown", "no verdict"]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Mean and sample standard deviation (n - 1) of one mixer's runs.

    Args:
        n: Finished runs.
        mean: Their mean, ``None`` without runs.
        sd: Their standard deviation, ``None`` below two runs.
    """

    n: int
    mean: float | None
    sd: float | None


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A paired difference with its 95 % interval.

    Args:
        n: Pairs (seeds or images) that it rests on.
        difference: Mixer minus baseline, as a fraction.
        low: Lower end, ``None`` where no interval exists.
        high: Upper end.
        p: Two-sided p-value of no difference, ``None`` where there is none.
        p_holm: The same after Holm's correction over the mixers of the comparison.
        note: What is out of the ordinary, in words, else empty.
    """

    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)


def summarize(values: Sequence[float]) -> Summary:
    """Compute mean and standard deviation over seeds, as far as there are seeds."""
    n = len(values)
    return Summary(
        n=n,
        mean=float(np.mean(values)) if n else None,
        sd=float(np.std(values, ddof=1)) if n > 1 else None,
    )


def over_seeds(mixer: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """Compare two mixers over the seeds that both have finished (paired t interval).

    Args:
        mixer: Accuracy of the mixer by seed.
        baseline: Accuracy of the baseline by seed.

    Returns:
        The interval, without ends below two pairs, and ``None`` without a pair.
    """
    seeds = sorted(set(mixer) & set(baseline))
    if not seeds:
        return None
    notes = []
    missing = len(set(mixer) | set(baseline)) - len(seeds)
    if missing:
        notes.append(f"{_plural(missing, 'seed')} left out because one run of the pair is missing")
    d: FloatArray = np.array([mixer[s] - baseline[s] for s in seeds], dtype=np.float64)
    n, mean = len(d), tidy(float(d.mean()))
    if n < 2:
        notes.append("one seed has no spread, so nothing can be said about retraining")
        return Interval(n=n, difference=mean, low=None, high=None, p=None, note="; ".join(notes))
    sd = float(d.std(ddof=1))
    if sd <= SAME:
        notes.append("the difference is the same at every seed, so its spread cannot be estimated")
        return Interval(n=n, difference=mean, low=None, high=None, p=None, note="; ".join(notes))
    error = sd / math.sqrt(n)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    return Interval(
        n=n, difference=mean, low=mean - half, high=mean + half, p=p, note="; ".join(notes)
    )


def over_images(
    mixer: Mapping[int, npt.NDArray[np.bool_]], baseline: Mapping[int, npt.NDArray[np.bool_]]
) -> Interval | None:
    """Compare two mixers over the test images, at the seeds that both have finished.

    Args:
        mixer: By seed, whether the mixer's model got each test image right, ``[N]``.
        baseline: The same of the baseline, same images in the same order.

    Returns:
        The adjusted normal interval of the module's head, ``None`` without a pair of runs.

    Raises:
        ValueError: If the runs were tested on different numbers of images.
    """
    seeds = sorted(set(mixer) & set(baseline))
    if not seeds:
        return None
    sizes = {len(runs[s]) for runs in (mixer, baseline) for s in seeds}
    if len(sizes) != 1:
        raise ValueError(f"runs were tested on different numbers of images: {sorted(sizes)}")
    (n,) = sizes
    if n == 0:
        return None
    ours = np.mean([mixer[s].astype(np.float64) for s in seeds], axis=0)
    theirs = np.mean([baseline[s].astype(np.float64) for s in seeds], axis=0)
    x: FloatArray = ours - theirs
    center = float(x.sum()) / (n + 2)
    variance = (float(np.square(x).sum()) + 2.0) / (n + 2) - center**2
    error = math.sqrt(max(variance, 0.0) / (n + 2))
    half = float(stats.norm.ppf(0.5 + LEVEL / 2)) * error
    notes = []
    if not np.any(x):
        notes.append("both get every test image right equally often")
    if n < 100:
        notes.append(f"only {n} test images, so the interval is rough")
    return Interval(
        n=n,
        difference=tidy(float(x.mean())),
        low=max(-1.0, center - half),
        high=min(1.0, center + half),
        p=float(2 * stats.norm.sf(abs(center) / error)),
        note="; ".join(notes),
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    r"""Adjust p-values by Holm's step-down method.

    With the m given values sorted upwards, :math:`\tilde p_{(k)} = \min(1, \max_{j \le k}
    (m - j + 1)\, p_{(j)})`. Missing values (``None``) stay missing, but count in m: a mixer whose
    runs happen to allow no test must not make the others look surer.
    """
    m = len(p_values)
    adjusted: list[float | None] = [None] * m
    running = 0.0
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    for rank, (p, i) in enumerate(known):
        running = max(running, (m - rank) * p)
        adjusted[i] = min(1.0, running)
    return adjusted


def correct_over_mixers(intervals: Sequence[Interval | None]) -> list[Interval | None]:
    """Return the intervals with ``p_holm`` filled in, one family for the whole sequence."""
    adjusted = holm([i.p if i is not None else None for i in intervals])
    return [
        None if i is None else replace(i, p_holm=p)
        for i, p in zip(intervals, adjusted, strict=True)
    ]


def tidy(difference: float) -> float:
    """Drop the last digits, where the same mean by two roads may differ and round apart."""
    return round(difference, 10)


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
