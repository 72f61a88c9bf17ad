# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from keymix.analysis.statistics import Interval
from keymix.compare.outcome import judge
from keymix.task import FRACTION, Score


def _interval(n: int, difference: float, half: float, p: float, **more: str) -> Interval:
    return Interval(
        n=n,
        difference=difference,
        low=difference - half,
        high=difference + half,
        p=p,
        p_holm=p,
        **more,
    )


SURE_IMAGES = _interval(1000, -0.02, 0.01, 0.001)
UNSURE_IMAGES = _interval(1000, -0.002, 0.01, 0.7)


def test_five_seeds_and_both_intervals_give_a_verdict_with_its_size():
    judgement = judge("ska", "softmax", _interval(5, -0.02, 0.01, 0.01), SURE_IMAGES, planned=5)
    assert judgement.verdict == "worse"
    assert judgement.headline == "ska is worse than softmax by 2.0 points."


def test_better_is_the_other_sign():
    judgement = judge(
        "ska",
        "softmax",
        _interval(6, 0.015, 0.01, 0.01),
        _interval(1000, 0.015, 0.01, 0.001),
        planned=6,
    )
    assert judgement.verdict == "better"
    assert "1.5 points" in judgement.headline


def test_three_seeds_never_give_a_verdict_however_small_p():
    judgement = judge("ska", "softmax", _interval(3, -0.02, 1e-4, 1e-6), SURE_IMAGES, planned=3)
    assert judgement.verdict == "no verdict"
    assert "whether it would hold if retrained cannot be said" in judgement.detail
    assert "−2.0 points" in judgement.detail
    assert "cannot be said" in judgement.headline


def test_seeds_alone_or_images_alone_are_not_enough():
    seeds_only = judge("a", "b", _interval(5, -0.002, 0.001, 0.01), UNSURE_IMAGES, planned=5)
    images_only = judge("a", "b", _interval(5, -0.02, 0.05, 0.4), SURE_IMAGES, planned=5)
    assert seeds_only.verdict == images_only.verdict == "no difference shown"
    assert "other test images" in seeds_only.headline
    assert "trained again might not" in images_only.headline


def test_no_difference_shown_says_how_large_one_could_hide():
    judgement = judge("a", "b", _interval(5, 0.001, 0.012, 0.8), UNSURE_IMAGES, planned=5)
    assert judgement.verdict == "no difference shown"
    assert "−1.1 to +1.3 points" in judgement.headline


def test_the_corrected_p_value_decides():
    seeds = Interval(n=5, difference=0.02, low=0.001, high=0.039, p=0.03, p_holm=0.15)
    judgement = judge("a", "b", seeds, _interval(1000, 0.02, 0.01, 0.001), planned=5)
    assert judgement.verdict == "no difference shown"


def test_a_mixer_without_finished_runs_is_said_to_have_none():
    judgement = judge("a", "b", None, None, planned=3)
    assert judgement.verdict == "no verdict"
    assert "no seed finished" in judgement.headline


def test_missing_runs_are_counted_aloud():
    seeds = Interval(n=2, difference=0.02, low=-0.1, high=0.14, p=0.3, p_holm=0.3)
    judgement = judge("a", "b", seeds, UNSURE_IMAGES, planned=3)
    assert "2 seeds of 3 finished" in judgement.detail


def test_a_difference_never_shows_a_signed_zero():
    assert FRACTION.change(-0.0001) == "0.0"
    assert FRACTION.change(0.0123) == "+1.2"
    assert FRACTION.change(-0.0123) == "−1.2"


ERROR = Score(
    key="mae",
    name="mean absolute error",
    short="MAE",
    label="error",
    better="less",
    high=None,
    unit="mm",
)


def test_of_an_error_less_is_better_and_its_differences_are_in_its_unit():
    seeds = _interval(5, -0.41, 0.1, 0.01)
    found = judge("a", "b", seeds, _interval(90, -0.4, 0.1, 0.001), planned=5, score=ERROR)
    assert found.verdict == "better"
    assert found.headline == "a is better than b by 0.41 mm."
    assert "−0.51 to −0.31" in found.detail
    assert "%" not in found.detail.replace("95\u00a0%", "")
    worse = judge("a", "b", _interval(3, 12.0, 1, 1e-4), SURE_MORE, planned=3, score=ERROR)
    assert "as trained here, is worse than b by 12.0 mm" in worse.headline


SURE_MORE = _interval(90, 12.0, 1.0, 0.001)


def test_without_a_unit_a_difference_is_a_number():
    score = replace(ERROR, unit="")
    found = judge("a", "b", _interval(5, 0.2, 1, 0.9), None, planned=5, score=score)
    assert found.headline.endswith("from −0.8 to +1.2.")


def test_an_interval_of_units_that_belong_together_is_called_too_narrow():
    for seeds, unit in ((1, "image"), (5, "case")):
        narrow_detail, silent = (
            judge(
                "a",
                "b",
                _interval(seeds, -0.02, 0.01, 0.01),
                SURE_IMAGES,
                planned=seeds,
                unit=unit,
                narrow=narrow,
            ).detail
            for narrow in (True, False)
        )
        assert f"too narrow, as {unit}s belong together" in narrow_detail
        assert "too narrow" not in silent


@pytest.mark.parametrize("seeds", [1, 5])
def test_an_interval_that_is_too_narrow_decides_nothing(seeds: int):
    over_seeds = _interval(seeds, -0.02, 0.001, 0.001)
    trusted, narrow = (
        judge("a", "b", over_seeds, SURE_IMAGES, planned=seeds, narrow=narrow)
        for narrow in (False, True)
    )
    assert narrow.headline != trusted.headline
    assert narrow.verdict not in ("better", "worse")
    assert "explain" not in narrow.detail
