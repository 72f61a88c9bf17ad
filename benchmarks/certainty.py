# SPDX-License-Identifier: Apache-2.0
"""How often what a comparison says is wrong: simulated comparisons whose truth is known.

    python benchmarks/certainty.py --comparisons 1000 --jobs 2

Every comparison has a baseline, named mixers and test images; the truth is the mixers' expected
accuracy over all trainings and images. Whether model s of mixer m gets image i right is

    mu_m + a_i + b_mi + c_ms + e_msi > 0,

normal and independent: how hard the image is, how hard it is for the mixer, how good the training
came out, and what is left. With the variances below two trainings of one mixer agree on about 80 %
of the images, and accuracy scatters by `SD` from one training to the next, as measured on
CIFAR-10. Printed are the shares of mixers, or of comparisons, of which something false is said:

- *clear* and *provisional*: a difference with the wrong sign, or of mixers that are equal;
- *equal*: of mixers that differ by more than the margin;
- *pick*: the recommended mixer is truly behind the best mixer by more than the margin;

and next to each how often it is said at all. With looks, the comparison is finished at three, five
and ten seeds in turn, and counts as wrong if any of the three says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from keymix.analysis.certainty import (
    Candidate,
    Evidence,
    TrainingCost,
    alpha_of_look,
    judge,
    recommend,
)
from keymix.analysis.statistics import crossed_difference, over_images, over_seeds
from keymix.task import FRACTION
from keymix.tasks.classification.answers import ClassAnswers
from measured import begin, options, table

OF_IMAGE, OF_MIXER, SD = 0.55, 0.05, 0.008
"""Variances of a_i and b_mi, of a whole of 1; deviation of accuracy over trainings."""
ACCURACY, MARGIN = 0.6, 0.02
UNITS, SEEDS, LOOKS = (449, 1_000, 10_000), (3, 5, 10), (3, 5, 10)
KINDS = ("clear", "provisional", "equal", "pick")
TRUTHS = {
    "all equal": (0.0, 0.0, 0.0, 0.0),
    "one 3 points ahead": (0.03, 0.0, 0.0, 0.0),
    "one 3 points behind": (-0.03, 0.0, 0.0, 0.0),
    "2.5 points apart": (0.025, -0.025, 0.025, -0.025),
}
"""True differences from the baseline of four named mixers."""

Right = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Case:
    """A kind of comparison: the truth, the test images, the seeds, and whether it is looked at."""

    truth: str
    units: int
    seeds: int
    looks: bool


def simulated(rng: np.random.Generator, case: Case) -> list[Right]:
    """Draw which images each model gets right, of the baseline and then the mixers.

    Shape: ``[S, N]`` each.
    """
    shape = (case.seeds, case.units)
    hard = rng.normal(0, OF_IMAGE**0.5, case.units)
    found = []
    density = stats.norm.pdf(stats.norm.ppf(ACCURACY))
    for difference in (0.0, *TRUTHS[case.truth]):
        mu = stats.norm.ppf(ACCURACY + difference)
        own = rng.normal(0, OF_MIXER**0.5, case.units)
        training = rng.normal(0, SD / density, (case.seeds, 1))
        rest = rng.normal(0, (1 - OF_IMAGE - OF_MIXER) ** 0.5, shape)
        found.append(mu + hard + own + training + rest > 0)
    return found


def answers(right: Right) -> dict[int, ClassAnswers]:
    """Make answers of two classes, the true one always 1."""
    n = right.shape[1]
    index, target = np.arange(n), np.ones(n, dtype=np.int64)
    return {
        seed: ClassAnswers(
            index=index,
            target=target,
            predicted=row.astype(np.int64),
            top5=np.ones(n, dtype=bool),
            confidence=np.ones(n, dtype=np.float16),
            classes=("a", "b"),
        )
        for seed, row in enumerate(right)
    }


def said(models: Sequence[Right], alpha: float) -> tuple[list[tuple[str, str | None]], int | None]:
    """Return degree and direction of each mixer, and which is recommended, 0 for the baseline."""
    each = [answers(right) for right in models]
    base = each[0]
    evidence = {}
    for m, mine in enumerate(each[1:], start=1):
        accuracy, of_base = (
            {seed: float(a.correct.mean()) for seed, a in runs.items()} for runs in (mine, base)
        )
        ours, theirs = ({s: a.correct for s, a in runs.items()} for runs in (mine, base))
        evidence[str(m)] = Evidence(
            crossed=crossed_difference(mine, base),
            by_seed=[accuracy[s] - of_base[s] for s in accuracy],
            seeds=over_seeds(accuracy, of_base),
            units=over_images(ours, theirs),
        )
    found = judge(evidence, alpha=alpha, margin=MARGIN, score=FRACTION)
    # validation is other images of the same models: its mean scatters as the test's does
    validation = {str(m): float(right[:, ::2].mean()) for m, right in enumerate(models)}
    tested = {str(m): answers(right[:, 1::2]) for m, right in enumerate(models)}
    candidates = {
        label: Candidate(
            validation=validation[label],
            answers=tested[label],
            cost=TrainingCost(low=None, high=None, macs=-float(label)),  # the last is the cheapest
        )
        for label in tested
    }
    pick = recommend(candidates, baseline="0", margin=MARGIN, score=FRACTION).pick
    degrees = [(each.degree, each.direction) for each in found.values()]
    return degrees, None if pick is None else int(pick)


def tally(case: Case, comparisons: int, seed: int) -> Counter[str]:
    """Simulate comparisons of a kind and count what is said, and what of it is wrong."""
    rng, counts = np.random.default_rng(seed), Counter[str]()
    true = (0.0, *TRUTHS[case.truth])
    for _ in range(comparisons):
        whole = simulated(rng, case)
        looks = [n for n in LOOKS if n <= case.seeds] if case.looks else [case.seeds]
        said_now: set[str] = set()
        for number, seeds in enumerate(looks, start=1):
            degrees, pick = said([right[:seeds] for right in whole], alpha_of_look(number))
            for m, (degree, direction) in enumerate(degrees, start=1):
                said_now.add(f"{degree} {m}")
                sign = {"better": 1, "worse": -1}.get(direction or "", 0)
                if sign and sign * true[m] <= 0:
                    said_now.add(f"wrong {degree} {m}")
                if degree == "equal" and abs(true[m]) > MARGIN:
                    said_now.add(f"wrong equal {m}")
            if pick is not None:
                said_now.add("pick 1")
                if true[pick] < max(true) - MARGIN:
                    said_now.add("wrong pick 1")
        counts.update(each.rpartition(" ")[0] for each in said_now)
    return counts


def rows(comparisons: int, jobs: int) -> Iterator[list[object]]:
    """Yield every kind of comparison with its shares, in percent: said, and said wrongly."""
    cases = [Case(t, n, s, looks=False) for t in TRUTHS for n in UNITS for s in SEEDS]
    cases += [Case(t, n, LOOKS[-1], looks=True) for t in TRUTHS for n in UNITS]
    with ProcessPoolExecutor(jobs) as pool:
        done = [pool.submit(tally, case, comparisons, i) for i, case in enumerate(cases)]
        for case, future in zip(cases, done, strict=True):
            cells = []
            for kind in KINDS:
                of = comparisons * (1 if kind == "pick" else len(TRUTHS[case.truth]))
                shares = (100 * future.result()[key] / of for key in (kind, f"wrong {kind}"))
                cells.append(" / ".join(f"{share:.1f}" for share in shares))
            yield [case.truth, f"{case.units:,}", "3, 5, 10" if case.looks else case.seeds, *cells]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--comparisons", type=int, default=1_000)
    parser.add_argument("--jobs", type=int, default=2)
    given = begin(parser, argv)
    table(("truth", "images", "seeds", *KINDS), rows(given.comparisons, given.jobs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
