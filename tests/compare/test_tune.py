# SPDX-License-Identifier: Apache-2.0
"""The learning rate is chosen on validation alone, at a seed of its own, one for all mixers."""

from __future__ import annotations

from pathlib import Path

import pytest
from few_digits import small

from keymix.compare.folder import read
from keymix.compare.question import Question
from keymix.compare.run import rebuild
from keymix.compare.tune import FACTORS, SEED, choose
from keymix.errors import UserError
from keymix.report.comparison_page import render
from keymix.report.words import say
from keymix.task import FRACTION, Score

ERROR = Score(key="e", name="error", short="e", label="e", better="less", high=None, unit="mm")
Rates = dict[float, dict[str, float]]


def rates(low: list[float], middle: list[float], high: list[float]) -> Rates:
    names = [f"m{i}" for i in range(len(middle))]
    return {
        rate: dict(zip(names, values, strict=True))
        for rate, values in zip((1e-3, 2e-3, 4e-3), (low, middle, high), strict=True)
    }


def test_a_rate_that_is_better_by_more_than_one_standard_error_is_taken() -> None:
    found = rates([0.1, 0.1, 0.1], [0.5, 0.6, 0.7], [0.53, 0.62, 0.74])
    assert choose(found, default=2e-3, score=FRACTION).chosen == 4e-3
    assert choose(found, default=2e-3, score=ERROR).chosen == 1e-3


def test_the_recipes_rate_stays_where_another_is_better_by_chance() -> None:
    found = rates([0.1, 0.1, 0.1], [0.5, 0.6, 0.7], [0.6, 0.57, 0.69])
    chosen = choose(found, default=2e-3, score=FRACTION)
    assert chosen.chosen == chosen.default == 2e-3
    assert "the recipe's" in say("tuning", chosen, FRACTION)


def test_a_mixer_that_failed_at_a_rate_is_left_out_and_without_any_it_is_an_error() -> None:
    found = rates([0.1, 0.1], [0.5, 0.6], [0.55, 0.66])
    del found[4e-3]["m0"]
    assert choose(found, default=2e-3, score=FRACTION).chosen == 4e-3
    del found[1e-3]["m1"]
    with pytest.raises(UserError, match="--tune lr"):
        choose(found, default=2e-3, score=FRACTION)


@pytest.mark.slow
def test_a_comparison_tunes_once_trains_at_the_rate_and_shows_the_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = small(out, tune="lr", controls=True)
    kept = read(out).plan.tuning
    assert kept is not None
    assert done.record.tuning == kept
    assert done.record.recipe.optim.lr == kept.chosen
    assert [row.rate / kept.default for row in kept.rows] == list(FACTORS)
    assert set(kept.rows[0].scores) == {"softmax", "static_key"}  # no control
    runs = sorted((out / "tune").glob("lr*/runs/*/seed*"))
    assert len(runs) == 6
    assert {run.name for run in runs} == {f"seed{SEED}"}
    assert "Learning rate" in render(done.record)
    times = [run.stat().st_mtime_ns for run in runs]
    again = small(out, tune="lr", controls=True)
    assert again.record.outcome == done.record.outcome
    assert [run.stat().st_mtime_ns for run in runs] == times
    assert rebuild(out).record.tuning == kept
    small(out, overwrite=True)
    assert not (out / "tune").exists()
    assert read(out).plan.tuning is None


def test_nothing_else_can_be_tuned() -> None:
    with pytest.raises(UserError, match="unknown tune 'epochs'"):
        Question(tune="epochs")  # type: ignore[arg-type]
