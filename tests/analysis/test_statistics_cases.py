# SPDX-License-Identifier: Apache-2.0
"""The interval over test cases: by hand, against leaving out by hand, and its coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from keymix.analysis.statistics import by_case, over_cases
from keymix.compare.results import outcome
from keymix.compare.runs import Scores
from keymix.task import get_task
from keymix.tasks.segmentation.answers import MaskAnswers

ABC = ("a", "b", "c")  # names of classes


def pixels(*rows: tuple[int, int, int]) -> np.ndarray:
    """One case with so many classes: pixels shared, predicted, true."""
    return np.array(rows, dtype=np.int64)


def test_three_cases_by_hand():
    # one class; truth 100 pixels per case, as many predicted; the baseline shares half of them
    ours = np.stack([pixels((80, 100, 100)), pixels((60, 100, 100)), pixels((70, 100, 100))])
    theirs = np.stack([pixels((50, 100, 100))] * 3)

    def share(shared: int, area: int) -> float:  # both predict and have `area` pixels
        return shared / (2 * area - shared)

    whole = share(210, 300) - share(150, 300)
    without = [share(s, 200) - share(100, 200) for s in (130, 150, 140)]
    mean = sum(without) / 3
    error = math.sqrt(2 / 3 * sum((d - mean) ** 2 for d in without))
    half = 4.302652729911275 * error  # Student's t, two degrees of freedom

    found = over_cases({0: ours}, {0: theirs}, [0], classes=ABC)

    assert found is not None
    assert found.n == 3
    assert found.difference == pytest.approx(whole, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((whole - half, whole + half), abs=1e-9)
    assert found.p == pytest.approx(2 * stats.t.sf(whole / error, 2), rel=1e-6)
    assert found.note == "only 3 test cases, so the interval is rough"


def test_seeds_are_averaged_before_cases_are_left_out_and_the_background_counts_nowhere():
    rng = np.random.default_rng(0)

    def made(seed: int) -> np.ndarray:
        true = 50 + np.random.default_rng(9).integers(0, 99, (6, 3))
        said = 50 + np.random.default_rng(seed).integers(0, 99, (6, 3))
        return np.stack([rng.integers(0, np.minimum(true, said)), said, true], axis=-1)

    ours, theirs = {s: made(s) for s in (0, 1)}, {s: made(s + 5) for s in (0, 1, 2)}

    def pooled(counts: np.ndarray) -> float:
        shared, said, true = counts.sum(0)[1:].T
        return float((shared / (said + true - shared)).mean())

    def difference(kept: list[int]) -> float:
        return float(np.mean([pooled(ours[s][kept]) - pooled(theirs[s][kept]) for s in (0, 1)]))

    everyone = list(range(6))
    left_out = np.array([difference([i for i in everyone if i != g]) for g in everyone])
    error = math.sqrt(5 / 6 * np.square(left_out - left_out.mean()).sum())

    found = over_cases(ours, theirs, [1, 2], classes=ABC)

    assert found is not None
    assert found.difference == pytest.approx(difference(everyone), abs=1e-9)
    assert found.high is not None
    half = stats.t.ppf(0.975, 5) * error
    assert found.high - found.difference == pytest.approx(half, abs=1e-9)


def test_images_of_a_case_are_added_up():
    counts = np.arange(24).reshape(4, 2, 3)
    summed = by_case(counts, np.array([7, 3, 7, 3]))
    assert (summed == np.stack([counts[1] + counts[3], counts[0] + counts[2]])).all()


def test_one_case_has_a_difference_but_no_interval():
    found = over_cases(
        {0: pixels((8, 9, 10))[None]}, {0: pixels((7, 9, 10))[None]}, [0], classes=ABC
    )
    assert found is not None
    assert (found.n, found.low, found.high, found.p) == (1, None, None, None)
    assert "one case has no spread" in found.note


def test_equal_models_claim_nothing_instead_of_certainty():
    same = np.stack([pixels((8, 9, 10)), pixels((5, 9, 10))])
    found = over_cases({0: same}, {0: same}, [0], classes=ABC)
    assert found is not None
    assert (found.difference, found.low, found.p) == (0.0, None, None)
    assert "spread cannot be estimated" in found.note


def alone(stray: int, true: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Five cases, classes a and b in all, c true in the first; the baseline finds it elsewhere."""
    ours = np.stack([pixels((80 + i, 100, 100), (70 - i, 90, 100), (0, 0, 0)) for i in range(5)])
    theirs = np.stack([pixels((75, 100, 100), (60 + i, 90, 100), (0, 0, 0)) for i in range(5)])
    ours[0, 2], theirs[0, 2] = (true, true, true), (0, 0, true)
    theirs[3, 2, 1] = stray
    return ours, theirs


@pytest.mark.parametrize("stray", [0, 1])
def test_a_class_of_one_case_leaves_no_interval(stray: int):
    ours, theirs = alone(stray)
    found = over_cases({0: ours}, {0: theirs}, [0, 1, 2], classes=ABC)
    assert found is not None
    assert (found.n, found.low, found.high, found.p) == (5, None, None, None)
    assert found.difference > 0.3
    assert found.note == "c is in one test case alone, so nothing can be said of other cases"
    without = over_cases({0: ours}, {0: theirs}, [0, 1], classes=ABC)  # c does not count
    assert without is not None
    assert without.low is not None
    both = over_cases({0: ours[:, [2, 0, 2]]}, {0: theirs[:, [2, 0, 2]]}, [0, 1, 2], classes=ABC)
    assert both is not None
    assert both.note.startswith("a and c are each in one test case alone")


def test_a_row_names_the_class_of_one_case():
    ours, theirs = alone(0)
    scores = {
        label: {
            seed: Scores(
                val=0.5,
                test={"jaccard": score + seed / 100 + (label == "kv") * seed / 1000},
                answers=MaskAnswers(
                    index=np.arange(5),
                    group=np.arange(5),
                    counts=cases,
                    surfaces=np.full((5, 3, 2), np.nan),
                    bins=np.ones((5, 15, 3)),
                    classes=("background", "small_bowel", "large_bowel"),
                    scored=(1, 2),
                ),
            )
            for seed in range(5)
        }
        for label, score, cases in (("kv", 0.9, ours), ("softmax", 0.5, theirs))
    }
    task = get_task("segmentation")
    row = outcome(["softmax", "kv"], baseline="softmax", scores=scores, task=task)[1]
    assert row.degree == "unclear"
    assert row.interval is not None
    assert row.interval.low is None
    assert "large_bowel is in one test case alone" in row.interval.note


def test_a_class_of_no_case_is_no_matter():
    ours, theirs = alone(0, true=0)
    found = over_cases({0: ours}, {0: theirs}, [0, 1, 2], classes=ABC)
    assert found == over_cases({0: ours}, {0: theirs}, [0, 1], classes=ABC)
    assert found is not None
    assert found.low is not None


def test_without_a_pair_there_is_nothing_and_other_cases_are_refused():
    one, other = pixels((8, 9, 10))[None], pixels((8, 9, 11))[None]
    assert over_cases({0: one}, {1: one}, [0], classes=ABC) is None
    with pytest.raises(ValueError, match="different cases"):
        over_cases({0: one}, {0: other}, [0], classes=ABC)


def test_the_interval_covers_the_true_difference():
    """Thirty cases of unlike size and difficulty, three classes, truth by a large population."""

    def population(rng: np.random.Generator, cases: int) -> tuple[np.ndarray, np.ndarray]:
        true = rng.lognormal(7, 0.7, (cases, 3)).astype(np.int64) + 1
        hard = rng.beta(8, 2, (cases, 1))  # shared by both models
        models = []
        for gain in (0.02, 0.0):
            own = np.clip(hard + gain + rng.normal(0, 0.05, (cases, 3)), 0.05, 0.99)
            shared = (own * true).astype(np.int64)
            said = shared + (true * rng.uniform(0.02, 0.2, (cases, 3))).astype(np.int64)
            models.append(np.stack([shared, said, true], axis=-1))
        return models[0], models[1]

    def pooled(counts: np.ndarray) -> float:
        shared, said, true = counts.sum(0).T
        return float((shared / (said + true - shared)).mean())

    rng = np.random.default_rng(1)
    ours, theirs = population(rng, 200_000)
    truth = pooled(ours) - pooled(theirs)
    inside = 0
    for _ in range(1000):
        chosen = rng.integers(0, 200_000, 30)
        found = over_cases({0: ours[chosen]}, {0: theirs[chosen]}, [0, 1, 2], classes=ABC)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.note == ""
        inside += found.low <= truth <= found.high
    assert 920 <= inside <= 980
