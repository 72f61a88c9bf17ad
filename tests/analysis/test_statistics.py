# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from each import together
from keymix.analysis.statistics import (
    Interval,
    correct_over_mixers,
    holm,
    no_better_than_chance,
    over_images,
    over_seeds,
    summarize,
    wilson,
)


def test_two_seeds_that_could_mean_anything_have_no_interval():
    wide = over_seeds({0: 0.9, 1: 0.2}, {0: 0.3, 1: 0.1})
    assert wide is not None
    assert (wide.low, wide.high, wide.p) == (None, None, None)
    assert wide.note
    near = over_seeds({0: 0.91, 1: 0.92}, {0: 0.90, 1: 0.90})
    assert near is not None
    assert near.low is not None
    three = over_seeds({0: 0.9, 1: 0.2, 2: 0.9}, {0: 0.1, 1: 0.1, 2: 0.1})
    assert three is not None
    assert three.low is not None
    assert three.high is not None
    assert -1 <= three.low < three.high <= 1


def _runs(rows: list[list[int]]) -> dict[int, np.ndarray]:
    return {seed: np.array(row, dtype=bool) for seed, row in enumerate(rows)}


def test_seed_interval_equals_scipy_paired_t_test():
    a = {0: 0.91, 1: 0.93, 2: 0.90, 3: 0.95, 4: 0.92}
    b = {0: 0.90, 1: 0.91, 2: 0.91, 3: 0.93, 4: 0.90}
    reference = stats.ttest_rel(list(a.values()), list(b.values()))
    ends = reference.confidence_interval(0.95)

    interval = over_seeds(a, b)

    assert interval is not None
    assert interval.p == pytest.approx(reference.pvalue, rel=1e-12)
    assert (interval.low, interval.high) == pytest.approx((ends.low, ends.high), rel=1e-12)
    assert interval.difference == pytest.approx(0.012)


def test_seed_interval_pairs_by_seed_and_not_by_position():
    a = {3: 0.95, 0: 0.91, 1: 0.93}
    b = {0: 0.90, 1: 0.91, 3: 0.93}
    reference = stats.ttest_rel([0.91, 0.93, 0.95], [0.90, 0.91, 0.93])

    interval = over_seeds(a, b)

    assert interval is not None
    assert interval.p == pytest.approx(reference.pvalue)


def test_a_failed_run_leaves_its_pair_out_and_says_so():
    interval = over_seeds({0: 0.9, 2: 0.8}, {0: 0.8, 1: 0.7, 2: 0.6})
    assert interval is not None
    assert interval.n == 2
    assert interval.difference == pytest.approx(0.15)
    assert "1 seed left out" in interval.note


def test_no_common_seed_gives_no_interval():
    assert over_seeds({0: 0.9}, {1: 0.9}) is None
    assert over_images({}, {}) is None


def test_one_seed_has_a_difference_but_no_interval():
    interval = over_seeds({0: 0.9}, {0: 0.8})
    assert interval is not None
    assert (interval.low, interval.high, interval.p) == (None, None, None)
    assert "one seed" in interval.note


@pytest.mark.parametrize("stored", [float, lambda value: float(np.float32(value))])
def test_equal_differences_claim_nothing_instead_of_certainty(stored):
    ours, theirs = {0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.8, 1: 0.7, 2: 0.6}
    interval = over_seeds(*({s: stored(v) for s, v in runs.items()} for runs in (ours, theirs)))
    assert interval is not None
    assert interval.low is None
    assert interval.p is None
    assert "same at every seed" in interval.note


def test_summary_is_the_sample_standard_deviation():
    summary = summarize([0.1, 0.2, 0.6])
    assert summary.mean == pytest.approx(0.3)
    assert summary.sd == pytest.approx(math.sqrt(0.14 / 2))
    assert summarize([0.5]).sd is None
    assert summarize([]).mean is None


def test_holm_by_hand():
    # sorted 0.01, 0.02, 0.03, 0.04 -> times 4, 3, 2, 1 -> 0.04, 0.06, 0.06, 0.04 -> running max
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_counts_missing_tests_in_the_family():
    assert holm([0.01, None, 0.02]) == pytest.approx([0.03, None, 0.04])


def test_correction_keeps_the_order_and_the_gaps():
    one = Interval(n=3, difference=0.1, low=0.0, high=0.2, p=0.02)
    corrected = correct_over_mixers([one, None, one])
    assert corrected[1] is None
    assert [i.p_holm for i in corrected if i is not None] == pytest.approx([0.06, 0.06])


def test_image_interval_equals_bonett_and_price_at_one_seed():
    n, only_mixer, only_baseline = 200, 18, 7
    a = np.ones(n, dtype=bool)
    b = np.ones(n, dtype=bool)
    b[:only_mixer] = False
    a[only_mixer : only_mixer + only_baseline] = False
    p12, p21 = (only_mixer + 1) / (n + 2), (only_baseline + 1) / (n + 2)
    half = 1.959963984540054 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))

    interval = over_images({0: a}, {0: b})

    assert interval is not None
    assert interval.difference == pytest.approx((only_mixer - only_baseline) / n)
    assert (interval.low, interval.high) == pytest.approx((p12 - p21 - half, p12 - p21 + half))


def test_image_interval_averages_correctness_over_seeds_before_it_compares():
    # At every image the mixer wins one seed and loses the other: no difference at all.
    a, b = (
        _runs([[1, 1, 0, 0] * 50, [0, 0, 1, 1] * 50]),
        _runs([[0, 0, 1, 1] * 50, [1, 1, 0, 0] * 50]),
    )
    interval = over_images(a, b)
    assert interval is not None
    assert interval.difference == 0
    assert interval.p == pytest.approx(1.0)


def test_identical_predictions_still_have_an_honest_width():
    same = _runs([[1, 0, 1, 1] * 90])
    interval = over_images(same, same)
    assert interval is not None
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low < 0 < interval.high
    assert interval.high > 1 / 360
    assert "equally often" in interval.note


def test_image_interval_stays_within_possible_differences():
    interval = over_images(_runs([[1] * 120]), _runs([[0] * 120]))
    assert interval is not None
    assert interval.high == 1.0


def test_both_questions_are_about_the_very_same_difference():
    rng = np.random.default_rng(2)
    for _ in range(50):
        a = {s: rng.random(449) < 0.9 for s in range(3)}
        b = {s: rng.random(449) < 0.88 for s in range(3)}
        images = over_images(a, b)
        seeds = over_seeds(
            {s: float(v.mean()) for s, v in a.items()}, {s: float(v.mean()) for s, v in b.items()}
        )
        assert images is not None
        assert seeds is not None
        assert images.difference == seeds.difference


def test_different_test_sets_are_refused():
    with pytest.raises(ValueError, match="different numbers"):
        over_images(_runs([[1, 0]]), _runs([[1, 0, 1]]))


def test_image_interval_is_deterministic():
    rng = np.random.default_rng(3)
    a, b = {0: rng.random(300) < 0.9}, {0: rng.random(300) < 0.88}
    assert over_images(a, b) == over_images(a, b)


@pytest.mark.parametrize(
    ("n", "p_mixer", "p_base", "shared", "most"),
    [
        (360, 0.95, 0.93, 0.8, 0.985),
        (1000, 0.93, 0.90, 0.5, 0.965),
        (150, 0.99, 0.985, 0.9, 1.0),  # few disputed images: wider than needed, never narrower
    ],
)
def test_image_interval_covers_the_true_difference(n, p_mixer, p_base, shared, most):
    """Images of varying difficulty, two models that share most of it; 2000 test sets."""
    rng = np.random.default_rng(0)
    covered, trials = 0, 2000
    for _ in range(trials):
        common, own_a, own_b = rng.random(n), rng.random(n), rng.random(n)
        use_common = rng.random(n) < shared
        a = np.where(use_common, common, own_a) < p_mixer
        b = np.where(use_common, common, own_b) < p_base
        interval = over_images({0: a}, {0: b})
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= p_mixer - p_base <= interval.high
    assert 0.935 <= covered / trials <= most


def test_seed_interval_covers_the_true_difference():
    rng = np.random.default_rng(1)
    covered, trials = 0, 2000
    for _ in range(trials):
        level = rng.normal(0.9, 0.02, 5)
        a = dict(enumerate(level + 0.01 + rng.normal(0, 0.005, 5)))
        b = dict(enumerate(level + rng.normal(0, 0.005, 5)))
        interval = over_seeds(a, b)
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 0.01 <= interval.high
    assert 0.935 <= covered / trials <= 0.965


@pytest.mark.parametrize(("right", "n"), [(0, 7), (9, 10), (36, 36), (450, 1000)])
def test_the_interval_of_an_accuracy_is_wilson_s(right, n):
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert wilson(right / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


@together
@pytest.mark.parametrize(
    ("top1", "images", "guesses"),
    [
        (0.1, 10_000, True),
        (0.105, 10_000, True),  # a standard error is 0.003
        (0.108, 10_000, False),
        (0.16, 25, True),  # and 0.06
        (0.24, 25, False),
        (0.02, 25, True),
    ],
)
def test_guessing_ends_two_standard_errors_above_chance(top1, images, guesses):
    assert no_better_than_chance(top1, classes=10, images=images) is guesses
