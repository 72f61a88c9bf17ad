# SPDX-License-Identifier: Apache-2.0
"""What gives way where a comparison must fit into a number of minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from keymix.compare import run
from keymix.compare.budget import MOST, Budget, as_before, fit_to_budget
from keymix.compare.defaults import FLOOR, updates
from keymix.compare.eta import Trial
from keymix.compare.plan import Plan, PlannedMixer
from keymix.errors import UserError
from keymix.recipes import resolve
from keymix.train.recipe import replace_path

SIZES = {"train": 640, "val": 64, "test": 64}
TRIAL = Trial(step=0.1, image=1e-4, epoch=0.0)


def plan_of(*labels: str, seeds: int = 3, epochs: int = 100) -> Plan:
    changes = {"data.batch_size": 64, "schedule.epochs": epochs, "schedule.warmup_epochs": 1}
    mixers = [
        PlannedMixer(
            label=label,
            slug=label,
            control=label == "identity",
            reference=label == "plain",
            mixes_prefix=True,
            params=1,
            note="",
        )
        for label in labels
    ]
    return Plan(
        recipe=replace_path(resolve("digits_vit"), changes),
        mixers=tuple(mixers),
        seeds=tuple(range(seeds)),
        baseline="softmax",
        pooling="avg",
        pooled_for=(),
        out=Path("unused"),
        processes=1,
        threads=1,
    )


ALL = ("softmax", "a", "b", "c", "identity", "plain")


def fit(plan: Plan, minutes: float, *named: str) -> tuple[Plan, str]:
    trials = dict.fromkeys(plan.labels, TRIAL)
    return fit_to_budget(plan, trials, Budget(minutes=minutes, named=named), sizes=SIZES)


def test_updates_give_way_first_and_mixers_and_seeds_stay() -> None:
    found, text = fit(plan_of(*ALL), 28)  # of about 31 minutes: 18 runs of 100 s
    assert found.labels == ALL
    assert len(found.seeds) == 3
    assert FLOOR <= updates(found.recipe, SIZES["train"]) < 1_000
    assert f"{updates(found.recipe, 640):,} updates instead of 1,000" in text
    warmup = found.recipe.schedule.warmup_epochs
    assert warmup == pytest.approx(found.recipe.schedule.epochs / 10)


def test_then_unnamed_mixers_the_last_first_but_no_control_baseline_or_reference() -> None:
    found, text = fit(plan_of(*ALL), 20)
    assert found.labels == ("softmax", "a", "identity", "plain")
    assert "without b, c" in text
    assert len(found.seeds) == 3


def test_then_seeds_and_what_is_named_stays_and_is_said_to_take_longer() -> None:
    found, text = fit(plan_of(*ALL), 7)
    assert len(found.seeds) == 1
    assert "1 of 3 seeds" in text
    named, said = fit(plan_of(*ALL), 2, "mixers", "seeds", "epochs")
    assert named == plan_of(*ALL)
    assert "2 minutes are too few" in said
    kept, _ = fit(plan_of(*ALL), 7, "seeds")
    assert len(kept.seeds) == 3


def test_time_that_is_left_goes_into_updates() -> None:
    plan = plan_of("softmax", "a", seeds=1, epochs=80)
    found, _ = fit(plan, 10)
    assert updates(found.recipe, 640) > 2 * updates(plan.recipe, 640)
    most, _ = fit(plan, 10_000)
    assert most.recipe.schedule.epochs == MOST * 80
    same, text = fit(plan, 10, "epochs")
    assert (same, text) == (plan, "")


def test_a_resumed_comparison_keeps_what_the_first_call_fitted() -> None:
    first = replace(plan_of("softmax", "a"), seeds=(0,))
    again = as_before(plan_of(*ALL), first, ())
    assert (again.labels, again.seeds) == (("softmax", "a"), (0,))
    assert as_before(plan_of(*ALL), first, ("mixers", "seeds")) == plan_of(*ALL)


@pytest.mark.parametrize("minutes", [0, -1, float("inf"), float("nan")])
def test_minutes_are_positive(minutes: float) -> None:
    with pytest.raises(UserError, match="minutes"):
        Budget(minutes=minutes)


@pytest.mark.slow
def test_a_comparison_fits_itself_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "data": "digits",
        "limit": 100,
        "reference": False,
        "processes": 1,
        "minutes": 0.01,
        "epochs": 1,
        "out": tmp_path / "out",
    }
    slow = Trial(step=5.0, image=1e-4, epoch=0.0)
    calls: list[int] = []

    def trials(plan: Plan, *_: object) -> dict[str, Trial | None]:
        calls.append(1)
        return dict.fromkeys(plan.labels, slow)

    monkeypatch.setattr(run, "trials_here", trials)
    first = run.compare(**settings)
    assert len(first.record.labels) == 3
    assert first.record.labels[-1] == "identity"
    assert first.record.seeds == (0,)
    again = run.compare(**settings)
    assert again.record.labels == first.record.labels
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("minutes", "given", "side", "tries"),
    [(100, {}, 224, 2), (1, {}, 128, 1), (100, {"data.image_size": 64}, 64, 1)],
)
def test_large_images_get_more_pixels_from_four_times_the_time(
    minutes: float,
    given: dict[str, Any],
    side: int,
    tries: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.full((200, 220, 3), 40 * i, np.uint8)
            pixels[i] = 0 if name == "cat" else 255
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    tried: list[Plan] = []
    plans: list[Plan] = []

    def trials(plan: Plan, *_: object) -> dict[str, Trial | None]:
        tried.append(plan)
        return dict.fromkeys(plan.labels, replace(TRIAL, step=0.01))

    monkeypatch.setattr(run, "trials_here", trials)
    monkeypatch.setattr(run, "expected", lambda plan, _: plans.append(plan) or "")
    run.plan_comparison(
        data=f"folder:{tmp_path / 'images'}",
        mixers="mhsa,ska",
        reference=False,
        minutes=minutes,
        overrides=given,
        out=tmp_path / "out",
    )
    assert plans[0].recipe.data.image_size == side
    assert len(tried) == tries
