# SPDX-License-Identifier: Apache-2.0
r"""How certain differences and accuracies are: over seeds, test images, test cases, and by chance.

Two questions about two mixers, two intervals. *Would it hold if the models were trained again?* is
asked of the seeds: the differences :math:`d_s = a_s - b_s` at shared seeds, their mean and
Student's t interval :math:`\bar d \pm t_{0.975,\,n-1}\, s_d / \sqrt n` (`over_seeds`). *Would it
hold on more images?* is asked of the test images, for the models as they were trained: :math:`x_i`
is how often mixer minus baseline gets image i right, averaged over seeds, and its mean gets an
adjusted normal interval (`bonett_price`). The same interval says what a swap costs on held-out
images. P-values of each question are corrected over the mixers by Holm's step-down method (1979).

Where images have masks, the unit is the case. Slices of one scan look alike, and organs of one
patient are hard in all of them: images of a case are no independent witnesses, and an interval over
images would be too narrow. The score of a model is its pooled mean Jaccard index :math:`J`, that of
the pixels of all test images counted together, which is no mean over cases; hence the jackknife
that leaves out one case each (Efron and Stein, 1981, doi:10.1214/aos/1176345462), which needs no
formula for the variance of such a ratio. With :math:`S` seeds that mixer :math:`a` and baseline
:math:`b` have both finished and :math:`G` cases, :math:`D` of all cases and :math:`D_{(g)}` of all
but case :math:`g` are (`over_cases`)

.. math::

    D = \frac{1}{S} \sum_s \left(J_{a,s} - J_{b,s}\right), \qquad
    \mathrm{se}^2 = \frac{G - 1}{G} \sum_g \left(D_{(g)} - \bar D_{(\cdot)}\right)^2, \qquad
    D \pm t_{0.975,\,G-1}\, \mathrm{se}.

A class that is true in one case alone leaves no interval: without that case the class drops out of
the mean, or not, by one stray prediction.

A score that depends on the order of all answers, such as an average precision, may jump where one
unit is left out. A task can take the paired percentile bootstrap for the interval over units
(`over_resamples`; Efron and Tibshirani 1993, An Introduction to the Bootstrap, ch. 13): the
difference is computed again for units drawn with replacement, the same for both models.

Quantities are fractions (accuracy 0.93), not percentages. NumPy and SciPy only. The test for a
difference of two latencies depends on how they were timed; it is in `keymix.analysis.timing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from keymix.analysis.answers import Answers, bounded, whole
from keymix.analysis.overlap import mean_jaccard
from keymix.task import FRACTION, Score

LEVEL = 0.95
"""Confidence of every interval."""

SAME = 1e-7
"""Standard deviation of differences up to which they are the same: less than one image of ten
million, and more than the rounding of accuracies that were stored in single precision."""

FEW_CASES = 20
"""With fewer test cases, a note says that the interval is rough."""

TWO_SEEDS = "two seeds differ too much for an interval"
"""Why two seeds have no interval; see `quoted`."""

FloatArray = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

Z = float(stats.norm.ppf(0.5 + LEVEL / 2))
"""Quantile of the normal distribution behind an interval at `LEVEL`."""


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
        level: Confidence of the ends.
    """

    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None = None
    note: str = ""
    level: float = LEVEL


def summarize(values: Sequence[float]) -> Summary:
    """Compute mean and standard deviation over seeds, as far as there are seeds."""
    n = len(values)
    return Summary(
        n=n,
        mean=float(np.mean(values)) if n else None,
        sd=float(np.std(values, ddof=1)) if n > 1 else None,
    )


def quoted(
    score: Score, low: float, high: float, *, seeds: int
) -> tuple[float, float] | tuple[None, None]:
    """Cut an interval of a difference to what differences can be; None where it then says nothing.

    Two seeds give an interval of one degree of freedom: wider than the score's range, it is none.
    """
    most = math.inf if score.low is None or score.high is None else score.high - score.low
    return (None, None) if seeds == 2 and high - low > most else bounded(score, low, high)


def over_seeds(
    mixer: Mapping[int, float], baseline: Mapping[int, float], *, score: Score = FRACTION
) -> Interval | None:
    """Compare two mixers over the seeds that both have finished (paired t interval).

    Args:
        mixer: Score of the mixer by seed.
        baseline: Score of the baseline by seed.
        score: The score, which says how large a difference can be.

    Returns:
        The interval, without ends where it says nothing, and ``None`` without a pair.
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
    sd = float(d.std(ddof=1)) if n > 1 else 0.0
    low = high = p = None
    if n < 2:
        notes.append("one seed has no spread, so nothing can be said about retraining")
    elif sd <= SAME:
        notes.append("the difference is the same at every seed, so its spread cannot be estimated")
    else:
        below, above, p = _student(mean, sd / math.sqrt(n), n - 1)
        low, high = quoted(score, below, above, seeds=n)
        if low is None:
            p = None
            notes.append(TWO_SEEDS)
    return Interval(n=n, difference=mean, low=low, high=high, p=p, note="; ".join(notes))


def over_images(
    mixer: Mapping[int, npt.NDArray[np.bool_]],
    baseline: Mapping[int, npt.NDArray[np.bool_]],
    *,
    unit: str = "image",
) -> Interval | None:
    """Compare two mixers over the test images, at the seeds that both have finished.

    Args:
        mixer: By seed, whether the mixer's model got each test image right, ``[N]``.
        baseline: The same of the baseline, same images in the same order.
        unit: What an image is called, for the notes.

    Returns:
        The interval of `bonett_price`, ``None`` without a pair of runs.

    Raises:
        ValueError: If the runs were tested on different numbers of images.
    """
    seeds = sorted(set(mixer) & set(baseline))
    if not seeds:
        return None
    sizes = {len(runs[s]) for runs in (mixer, baseline) for s in seeds}
    if len(sizes) != 1:
        raise ValueError(f"runs were tested on different numbers of {unit}s: {sorted(sizes)}")
    (n,) = sizes
    if n == 0:
        return None
    ours = np.mean([mixer[s].astype(np.float64) for s in seeds], axis=0)
    theirs = np.mean([baseline[s].astype(np.float64) for s in seeds], axis=0)
    x: FloatArray = ours - theirs
    low, high, p = bonett_price(x)
    notes = []
    if not np.any(x):
        notes.append(f"both get every test {unit} right equally often")
    if n < 100:
        notes.append(f"only {n} test {unit}s, so the interval is rough")
    return Interval(
        n=n,
        difference=tidy(float(x.mean())),
        low=low,
        high=high,
        p=p,
        note="; ".join(notes),
    )


def bonett_price(differences: FloatArray) -> tuple[float, float, float]:
    """Return the adjusted normal interval of the mean of paired differences, and its p-value.

    Bonett and Price (2012, doi:10.1111/j.2044-8317.2011.02010.x): two imaginary images, one that
    only the one model and one that only the other gets right, join the sample. The closed form
    needs no random draws, keeps its coverage when few images are in dispute, and has a width even
    when none is.

    Args:
        differences: How often the one model minus the other gets each image right, from -1 to 1.

    Returns:
        Both ends at `LEVEL`, within -1 and 1, and the two-sided p-value of no difference.
    """
    n = len(differences) + 2
    center = float(differences.sum()) / n
    variance = (float(np.square(differences).sum()) + 2.0) / n - center**2
    error = math.sqrt(max(variance, 0.0) / n)
    low, high = max(-1.0, center - Z * error), min(1.0, center + Z * error)
    return low, high, float(2 * stats.norm.sf(abs(center) / error))


def by_case(counts: Counts, group: npt.NDArray[np.int64]) -> Counts:
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
        classes: Names of all classes, for the note.

    Shape: each ``[G, K, 3]``.

    Returns:
        The interval of the module's head, without ends where cases have no spread or a class that
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
    pooled, without = (
        np.mean([mean_jaccard(a, scored) - mean_jaccard(b, scored) for a, b in part], axis=0)
        for part in (
            [(a.sum(0), b.sum(0)) for a, b in pairs],
            [(a.sum(0) - a, b.sum(0) - b) for a, b in pairs],
        )
    )
    cases_of = (truths[0] > 0).sum(axis=0)
    single = [classes[c] for c, cases in zip(scored, cases_of, strict=True) if cases == 1]
    reason = ""
    if single:
        alone = (
            f"{' and '.join(single)} {'is' if len(single) == 1 else 'are each'} in one test case"
        )
        reason = f"{alone} alone, so nothing can be said of other cases"
    values = number * pooled - (number - 1) * without
    return _of_values(float(pooled), values, unit="case", reason=reason, ends=(-1.0, 1.0))


def over_units(
    mixer: Mapping[int, Answers], baseline: Mapping[int, Answers], *, score: Score, unit: str
) -> Interval | None:
    """Compare two mixers over the units of chance of any task, at the seeds that both finished.

    The delete-one jackknife of the module's head, with the task's score in place of J.

    Args:
        mixer: Answers of the mixer's models by seed.
        baseline: Those of the baseline's.
        score: The score that models are compared by.
        unit: What the units are, for the note, such as ``image``.

    Returns:
        The interval, without ends where units have no spread, and None without a pair of runs.

    Raises:
        ValueError: If the runs were tested on different inputs.
    """
    pairs = _tested_alike(mixer, baseline, unit)
    if not pairs:
        return None
    difference = float(np.mean([whole(a) - whole(b) for a, b in pairs]))
    values = np.mean([a.unit_values() - b.unit_values() for a, b in pairs], axis=0)
    defined = bool(np.isfinite(values).all())
    return _of_values(
        difference,
        values,
        unit=unit,
        reason="" if defined else f"without one of the {unit}s the {score.name} is not defined",
        ends=bounded(score, -math.inf, math.inf),
    )


def over_resamples(
    mixer: Mapping[int, Answers], baseline: Mapping[int, Answers], *, score: Score, unit: str
) -> Interval | None:
    """Compare two mixers over resampled units, at the seeds that both finished.

    The percentile interval of the mean over seeds of the difference of `Answers.resampled`. Its
    p-value is twice the smaller share of draws on one side of 0, ends counted once more.

    Args:
        mixer: Answers of the mixer's models by seed.
        baseline: Those of the baseline's.
        score: The score that models are compared by.
        unit: What the units are, for the note, such as ``image``.

    Returns:
        The interval, without ends where draws do not differ or most have no score, and None
        without a pair of runs.

    Raises:
        ValueError: If the runs were tested on different inputs.
    """
    pairs = _tested_alike(mixer, baseline, unit)
    if not pairs:
        return None
    number = pairs[0][0].units
    difference = tidy(float(np.mean([whole(a) - whole(b) for a, b in pairs])))
    draws = np.mean([a.resampled - b.resampled for a, b in pairs], axis=0)
    known = draws[np.isfinite(draws)]
    low = high = p = None
    if number < 2:
        note = f"one {unit} has no spread, so nothing can be said about other {unit}s"
    elif len(known) * 2 < len(draws):
        note = f"in most draws of {unit}s the {score.name} is not defined"
    elif float(known.std()) <= SAME:
        note = f"the difference is the same for all draws of {unit}s"
    else:
        note = f"only {number} test {unit}s, so the interval is rough" if number < FEW_CASES else ""
        low, high = percentiles(known)
        beyond = min(int((known <= 0).sum()), int((known >= 0).sum())) + 1
        p = min(1.0, 2 * beyond / (len(known) + 1))
    return Interval(n=number, difference=difference, low=low, high=high, p=p, note=note)


def percentiles(draws: FloatArray) -> tuple[float, float]:
    """Return the ends of the percentile interval of a bootstrap, at `LEVEL`.

    Args:
        draws: Of the bootstrap, those that are defined.
    """
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _tested_alike(
    mixer: Mapping[int, Answers], baseline: Mapping[int, Answers], unit: str
) -> list[tuple[Answers, Answers]]:
    """Pair the answers of shared seeds; none where there are no units."""
    pairs = [(mixer[s], baseline[s]) for s in sorted(set(mixer) & set(baseline))]
    if not all(pairs[0][0].same_truth(each) for pair in pairs for each in pair):
        raise ValueError(f"runs were tested on different {unit}s")
    return pairs if pairs and pairs[0][0].units else []


def _of_values(
    difference: float, values: FloatArray, *, unit: str, reason: str, ends: tuple[float, float]
) -> Interval:
    """Return the t interval of the mean of units' values, within `ends` of what it can be.

    `values` are those of `Answers.unit_values`; `reason` says why there is no interval.
    """
    number, difference = len(values), tidy(difference)
    error, low, high, p = 0.0, None, None, None
    if number > 1 and not reason:
        error = float(values.std(ddof=1)) / math.sqrt(number)
    if number < 2:
        note = f"one {unit} has no spread, so nothing can be said about other {unit}s"
    elif reason:
        note = reason
    elif error <= SAME:
        note = (
            f"the difference is the same without any one {unit}, so its spread cannot be estimated"
        )
    else:
        note = f"only {number} test {unit}s, so the interval is rough" if number < FEW_CASES else ""
        low, high, p = _student(difference, error, number - 1)
        low, high = max(ends[0], low), min(ends[1], high)
    return Interval(n=number, difference=difference, low=low, high=high, p=p, note=note)


@dataclass(frozen=True, kw_only=True)
class Crossed:
    r"""A mean over seeds and units with its standard error: training runs crossed with test units.

    Each seed's model answers every unit. With the values :math:`x_{su}` of :math:`S` seeds and
    :math:`U` units, a two-way random-effects model gives

    .. math:: \mathrm{se}^2 = \mathrm{se}_S^2 + \mathrm{se}_U^2 - \mathrm{MSE} / (S U),

    the variances of the means over seeds and over units, and the mean square of what is left, which
    is in both; neither is less than the last. Obuchowski and Rockette (1995,
    doi:10.1080/03610919508813243) with the degrees of freedom of Hillis (2007,
    doi:10.1002/sim.2532), Satterthwaite's over both:
    :math:`\mathrm{se}^4 / (\mathrm{se}_S^4 / (S - 1) + \mathrm{se}_U^4 / (U - 1))`. Of one seed
    it is the interval over units.

    Args:
        mean: The mean, or the mean difference.
        seeds: Number of seeds S.
        units: Number of units U.
        var_seeds: Variance of the mean over seeds, as if units were fixed.
        var_units: Variance of the mean over units, as if seeds were fixed.
        var_rest: The mean square of what is left, over S U.
    """

    mean: float
    seeds: int
    units: int
    var_seeds: float
    var_units: float
    var_rest: float

    @property
    def error(self) -> float:
        """The standard error."""
        return math.sqrt(max(self.var_seeds + self.var_units - self.var_rest, 0.0))

    @property
    def df(self) -> float:
        """Degrees of freedom of Student's t."""
        spread = self.var_units**2 / (self.units - 1)
        if self.seeds > 1:
            spread += self.var_seeds**2 / (self.seeds - 1)
        return self.error**4 / spread if spread > 0 else math.inf

    @property
    def p(self) -> float | None:
        """Two-sided p-value of a mean of 0; None without spread."""
        if self.error <= SAME:
            return None
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.df))

    def half(self, level: float) -> float:
        """Half the width of the interval at a level."""
        return float(stats.t.ppf(0.5 + level / 2, self.df)) * self.error

    def ends(self, level: float = LEVEL) -> tuple[float, float]:
        """Both ends of the interval at a level."""
        half = self.half(level)
        return self.mean - half, self.mean + half

    def error_with(self, *, seeds: int | None = None, units: int | None = None) -> float:
        """Predict the standard error with other numbers of seeds or units."""
        s, u = seeds or self.seeds, units or self.units
        rest = self.var_rest * self.seeds * self.units
        of_seeds = max(self.var_seeds - self.var_rest, 0.0) * self.seeds
        of_units = max(self.var_units - self.var_rest, 0.0) * self.units
        return math.sqrt(of_seeds / s + of_units / u + rest / (s * u))


def crossed(
    means: Sequence[float], values: Sequence[FloatArray], *, imaginary: float = 0.0
) -> Crossed | None:
    """Estimate a mean over seeds and units, and how certain it is.

    Args:
        means: The score, or the difference of scores, of each seed.
        values: Of each seed, the values of all units (`Answers.unit_values`, or their difference).
        imaginary: What joins the sum of squares over units, `Answers.imaginary`.

    Returns:
        The estimate; None with fewer than two units, without a seed, or of values not all defined.
    """
    x = np.array(values, dtype=np.float64)
    if not len(x) or x.shape[1] < 2 or not np.isfinite(x).all():
        return None
    s, u = x.shape
    over_units = x.mean(axis=0)
    var_units = float(over_units.var(ddof=1)) / u + imaginary / (u + 2) ** 2
    var_seeds = rest = 0.0
    if s > 1:
        left = x - x.mean(axis=1, keepdims=True) - over_units + x.mean()
        rest = float(np.square(left).sum()) / ((s - 1) * (u - 1) * s * u)
        var_seeds = max(float(np.var(means, ddof=1)) / s, rest)
        var_units = max(var_units, rest)
    mean = tidy(float(np.mean(means)))
    return Crossed(
        mean=mean, seeds=s, units=u, var_seeds=var_seeds, var_units=var_units, var_rest=rest
    )


def crossed_difference(
    mixer: Mapping[int, Answers], other: Mapping[int, Answers]
) -> Crossed | None:
    """Estimate the difference of two mixers at the seeds that both finished; see `crossed`.

    Args:
        mixer: Answers of the mixer's models by seed.
        other: Those of the other's, or under one key `EVERY_SEED` answers that no seed changes.
    """
    pairs = _pairs(mixer, other)
    if not pairs:
        return None
    return crossed(
        [whole(a) - whole(b) for a, b in pairs],
        [a.unit_values() - b.unit_values() for a, b in pairs],
        imaginary=pairs[0][0].imaginary,
    )


def crossed_mean(answers: Mapping[int, Answers]) -> Crossed | None:
    """Estimate the score of one mixer over seeds and units; see `crossed`.

    Args:
        answers: By seed.
    """
    each = list(answers.values())
    if not each:
        return None
    return crossed([whole(a) for a in each], [a.unit_values() for a in each])


EVERY_SEED = -1
"""The seed of answers that no training makes, such as the largest class."""


def _pairs(
    mixer: Mapping[int, Answers], other: Mapping[int, Answers]
) -> list[tuple[Answers, Answers]]:
    if EVERY_SEED in other:
        return [(mixer[s], other[EVERY_SEED]) for s in sorted(mixer)]
    return [(mixer[s], other[s]) for s in sorted(set(mixer) & set(other))]


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


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of an accuracy.

    In closed form, since a mean over seeds is no whole number of right answers, which
    `scipy.stats.binomtest` takes.

    Args:
        share: The accuracy, a fraction.
        n: Number of images, at least one.
    """
    z2 = Z**2 / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(share * (1 - share) / n + z2 / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def no_better_than_chance(top1: float, *, classes: int, images: int) -> bool:
    """Return whether an accuracy lies within two standard errors of chance, or below.

    Chance is 1 / classes, its standard error over the images sqrt(p (1 - p) / images).

    Args:
        top1: Share of right answers.
        classes: Classes to choose from.
        images: How many were answered.
    """
    chance = 1 / classes
    return top1 <= chance + 2 * math.sqrt(chance * (1 - chance) / images)


def _student(mean: float, error: float, df: float) -> tuple[float, float, float]:
    """Ends of Student's t interval of a mean by its standard error, and the p-value."""
    half = float(stats.t.ppf(0.5 + LEVEL / 2, df)) * error
    return mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, df))


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
