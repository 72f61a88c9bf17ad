# SPDX-License-Identifier: Apache-2.0
"""Time passes in turns, and say by a test whether two latencies differ. No torch in here.

Every round times every pass once, in an order that is drawn at random, with one number of inner
repeats for all. So if two passes take the same time, each round's ratio is as likely to lie above 1
as below, whatever the machine does meanwhile: drift, other programs, outliers. On that rests the
test of `compare`. Wall-clock time is what counts; CPU time only shows which samples another program
took a part of.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Verdict = Literal["different", "not distinguishable", "busy", "too few rounds"]

WORDS: Mapping[Verdict | None, str] = {
    "not distinguishable": "not distinguishable",
    "busy": "unclear, the machine was busy",
    "too few rounds": "not tested, too few rounds",
    None: "not tested",  # measured before there was a test, or of the original with itself
}
"""What is said of two latencies that are not called different."""
SHORT: Mapping[Verdict | None, str] = {
    "not distinguishable": "n.d.",
    "busy": "busy",
    "too few rounds": "few",
}
"""The same in the place of a number."""

LEVEL = 0.01
"""Chance at most that any of equal latencies are called different, over all comparisons that share
it: all mixers at one number of tokens (each number has a level of its own), all steps of a search.
"""
MARGIN = 0.02
"""Differences up to this are not called: where tensors lie in memory makes as much."""

_SHORTEST = 0.001  # seconds that a sample lasts at least, on average; the clock is small next to it
_ROUND = 0.005  # seconds a pass is timed for in a round, if it is short
_WARM = 3  # passes at least behind the number of inner repeats
_REST = 1e-4  # seconds before a sample: who slept runs undisturbed for a scheduler's slice, 3 ms
_QUIET = 0.9  # of a sample's wall time was its own CPU time: no other program ran in its place
_FEWEST = 10  # rounds: of fewer, a half alone cannot reach `_HALF_LEVEL`
_HALF_LEVEL = 0.05  # one-sided, that each half alone must reach
_DRIFT = 0.05  # halves that are distinguishable and further apart contradict each other
_AGREE = 0.1  # of wall and CPU time in their ratios, where too few rounds were quiet


class Clock(NamedTuple):
    """Seconds that passed, seconds that this thread ran, and how it sleeps."""

    wall: Callable[[], float]
    cpu: Callable[[], float]
    sleep: Callable[[float], object]


# Windows counts the time of a thread in steps of 16 ms: too coarse, so every sample is quiet there
CLOCK = Clock(
    time.perf_counter,
    time.perf_counter if sys.platform == "win32" else time.thread_time,
    time.sleep,
)
_ORDER = random.Random()


@dataclass(frozen=True)
class Pass:
    """What is timed."""

    call: Callable[[], object]  # runs it once
    # waits until the device has done it; None on a CPU. CPU time says nothing then
    wait: Callable[[], object] | None = None


@dataclass
class Samples:
    """Times of one pass, a sample a round."""

    wall: list[float] = field(default_factory=list)  # seconds
    cpu: list[float] = field(default_factory=list)  # seconds of them that the thread ran

    def quiet(self) -> list[bool]:
        """Say of each sample whether no other program ran in its place."""
        return [own >= _QUIET * wall for wall, own in zip(self.wall, self.cpu, strict=True)]

    def kept(self) -> list[float]:
        """Return the wall times that count: of quiet samples, of all where these are too few.

        Too few are less than ten or than a quarter of all.
        """
        return [self.wall[i] for i in _kept(self.quiet(), _FEWEST)]

    def quiet_share(self) -> float:
        """Return the share of quiet samples."""
        return statistics.fmean(self.quiet())


class Turns:
    """Times passes in turns, after a warm-up."""

    def __init__(self, passes: Mapping[str, Pass], warmup: int = _WARM) -> None:
        """Warm up, three passes at least, and choose from their medians how many make a sample."""
        self._passes = dict(passes)
        self.samples = {name: Samples() for name in passes}
        self.inner = 1
        # CPU time, so that a program which ran in between does not make the samples shorter
        warm = [[self._sample(name)[1] for name in passes] for _ in range(max(warmup, _WARM))]
        medians = map(statistics.median, zip(*warm, strict=True))
        mean = max(statistics.fmean(medians), 1e-7)
        self.inner = max(1, math.ceil(_SHORTEST / mean))
        self._times = max(1, round(_ROUND / (self.inner * mean)))

    def round(self) -> None:
        """Time every pass, a short one in several samples, each time in another order."""
        names = list(self._passes)
        for _ in range(self._times):
            _ORDER.shuffle(names)
            for name in names:
                wall, cpu = self._sample(name)
                self.samples[name].wall.append(wall)
                self.samples[name].cpu.append(cpu)

    def _sample(self, name: str) -> tuple[float, float]:
        """Time one sample: seconds a pass, and those that the thread ran."""
        call, wait = self._passes[name].call, self._passes[name].wait
        if wait is not None:
            wait()
        else:
            CLOCK.sleep(_REST)
        own, start = CLOCK.cpu(), CLOCK.wall()
        for _ in range(self.inner):
            call()
        if wait is not None:
            wait()
        wall = max(CLOCK.wall() - start, 1e-9) / self.inner
        return wall, wall if wait is not None else (CLOCK.cpu() - own) / self.inner


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Latencies of two passes that were timed in turns, and whether they differ."""

    base_ms: float  # median time of the first, milliseconds
    other_ms: float  # the same of the second
    ratio: float  # median over the rounds of the second's time over the first's in the same round
    ratio_q1: float  # first quartile of these ratios
    ratio_q3: float  # third quartile
    rounds: int  # rounds behind these numbers: the quiet ones, or all where these are too few
    quiet_share: float  # share of all rounds in which no other program took processor time
    p: float  # P-value of the test that `compare` describes
    # ``"different"``; ``"not distinguishable"``; ``"busy"`` where other programs, or halves of
    # the measurement that contradict each other, allow no answer; or ``"too few rounds"`` where
    # the test could not have rejected, whatever the times
    verdict: Verdict

    def ratio_text(self, digits: int = 2) -> str:
        """Write the ratio where the latencies are called different, else what `SHORT` says."""
        return SHORT.get(self.verdict) or f"{self.ratio:.{digits}f}"


def fewest_rounds(comparisons: int = 1) -> int:
    """Return how many rounds the test of `compare` takes at least to call anything different.

    Ten, which the halves take; more where the smallest p-value of n rounds, 2 / 2^n, has to reach
    a smaller level: 12 for 13 comparisons.
    """
    return max(_FEWEST, math.ceil(math.log2(2 * comparisons / LEVEL)))


def compare(base: Samples, other: Samples, *, comparisons: int = 1) -> Paired:
    r"""Say whether two latencies differ, from samples of the same rounds.

    The test is Wilcoxon's signed-rank test of the logarithms of the rounds' ratios, two-sided, of
    the hypothesis that the ratio lies within 1 ± `MARGIN`. The order within a round was drawn at
    random, so it is exact for equal passes under any drift or load. Its level is `LEVEL` divided by
    the comparisons made against one baseline (Bonferroni), so that it holds for all of them
    together. Two latencies are called different if it rejects and each half of the rounds points
    the same way alone (one-sided, 5 %). `fewest_rounds` are the fewest that can reach both.

    Rounds in which another program took more than a tenth of a sample are set aside where at least
    `fewest_rounds`, and a quarter of all, are left; otherwise all rounds count. The verdict is
    ``"busy"`` if the halves contradict each other (Mann-Whitney's test, 1 %, and medians more than
    5 % apart), if all rounds count although some were disturbed and the ratio of CPU times is
    another (by more than 10 %), or if nothing is called different and most rounds were disturbed.
    Where the machine was not busy and fewer than `fewest_rounds` were timed, it is
    ``"too few rounds"``.
    """
    quiet = [a and b for a, b in zip(base.quiet(), other.quiet(), strict=True)]
    fewest = fewest_rounds(comparisons)
    rounds = _kept(quiet, fewest)
    logs = [math.log(other.wall[i] / base.wall[i]) for i in rounds]
    half = len(logs) // 2
    halves = (logs[:half], logs[half:])
    slower, faster = _tails(logs, MARGIN)
    p = min(1.0, 2 * min(slower, faster))
    side = 0 if slower < faster else 1
    agree = all(_tails(each, 0.0)[side] <= _HALF_LEVEL for each in halves)
    unsorted = len(rounds) == len(quiet) and not all(quiet)
    verdict: Verdict = "not distinguishable"
    if _contradict(*halves) or (unsorted and _apart(base, other)):
        verdict = "busy"
    elif len(rounds) >= fewest and p <= LEVEL / comparisons and agree:
        verdict = "different"
    elif statistics.fmean(quiet) < 0.5:
        verdict = "busy"
    elif len(rounds) < fewest:
        verdict = "too few rounds"
    low, middle, high = quartiles(logs)
    return Paired(
        base_ms=1e3 * statistics.median(base.wall[i] for i in rounds),
        other_ms=1e3 * statistics.median(other.wall[i] for i in rounds),
        ratio=math.exp(middle),
        ratio_q1=math.exp(low),
        ratio_q3=math.exp(high),
        rounds=len(rounds),
        quiet_share=statistics.fmean(quiet),
        p=p,
        verdict=verdict,
    )


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile of at least one sample."""
    if len(samples) == 1:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def _kept(quiet: Sequence[bool], fewest: int) -> list[int]:
    """Positions of the quiet rounds if they are at least the fewest and a quarter, else of all."""
    calm = [i for i, each in enumerate(quiet) if each]
    return calm if len(calm) >= max(fewest, len(quiet) / 4) else list(range(len(quiet)))


def _tails(logs: Sequence[float], margin: float) -> tuple[float, float]:
    """One-sided p-values of the signed-rank test: above the margin, and below it."""
    from scipy.stats import wilcoxon

    edge = math.log1p(margin)
    above, below = [each - edge for each in logs if each != edge], [each + edge for each in logs]
    below = [each for each in below if each != 0]
    return (
        float(wilcoxon(above, alternative="greater").pvalue) if above else 1.0,
        float(wilcoxon(below, alternative="less").pvalue) if below else 1.0,
    )


def _contradict(first: Sequence[float], second: Sequence[float]) -> bool:
    from scipy.stats import mannwhitneyu

    if not first:
        return False
    apart = abs(statistics.median(first) - statistics.median(second))
    return apart > math.log1p(_DRIFT) and bool(mannwhitneyu(first, second).pvalue <= LEVEL)


def _apart(base: Samples, other: Samples) -> bool:
    """Whether wall and CPU time give different ratios, so that the former is the scheduler's."""
    ratios = [
        statistics.median(math.log(max(b, 1e-9) / max(a, 1e-9)) for a, b in zip(*each, strict=True))
        for each in ((base.wall, other.wall), (base.cpu, other.cpu))
    ]
    return abs(ratios[0] - ratios[1]) > math.log1p(_AGREE)
