# SPDX-License-Identifier: Apache-2.0
"""How long a comparison takes by a few timed steps, and what gives way to a budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from few_digits import small
from PIL import Image

from keymix.cli.comparison import Lines
from keymix.compare import budget, defaults
from keymix.compare.budget import MOST, Load, Trial, fit, timed
from keymix.compare.defaults import FLOOR, updates
from keymix.compare.events import Event, Remaining
from keymix.compare.folder import read
from keymix.compare.plan import resolve
from keymix.compare.question import Plan, Question
from keymix.data import load
from keymix.errors import UserError
from keymix.recipes import get
from keymix.tasks.classification.training import ClassificationTask
from keymix.train.recipe import Recipe, replace_path

SIZES = {"train": 640, "val": 64, "test": 64}
TRIAL = Trial(step=0.1, image=1e-4)
LABELS = ("softmax", "a", "b", "c", "identity", "plain")


def recipe_of(epochs: int) -> Recipe:
    changes = {"data.batch_size": 64, "schedule.epochs": epochs, "schedule.warmup_epochs": 1}
    return replace_path(get("digits_vit"), changes)


def fitted(minutes: float, *, epochs: int = 100, labels: tuple[str, ...] = LABELS, **more: Any):
    work = Load(trials=dict.fromkeys(labels, TRIAL), sizes=SIZES, seeds=3, processes=1)
    rules = {"epochs_stay": False, "may_grow": False, "may_go": ["b", "c"]} | more
    return fit(work, recipe_of(epochs), minutes, **rules)


def test_a_run_is_its_steps_its_validation_and_twice_the_test() -> None:
    trial = Trial(step=1.0, image=0.01, start=3.0)
    sizes = {"train": 129, "val": 100, "test": 1000}
    expected = 3 + 10 * (3 * 1.0 + 1.0 + budget.EPOCH_SECONDS) + 20
    assert trial.run(recipe_of(10), sizes) == pytest.approx(expected)


def test_epochs_give_way_first_and_not_below_what_findings_call_too_few() -> None:
    found = fitted(29)  # of about 32 minutes: 18 runs of 100 s, then costs
    assert found.left_out == ()
    assert FLOOR / 10 <= found.epochs < 100


def test_then_mixers_that_may_go_the_last_first() -> None:
    found = fitted(22)
    assert found.left_out == ("c",)
    assert fitted(19).left_out == ("b", "c")


def test_a_budget_that_cannot_hold_the_rest_is_refused_with_the_smallest_that_can() -> None:
    with pytest.raises(UserError, match=r"^5 minutes .* --minutes (\d+)") as refused:
        fitted(5)
    smallest = int(str(refused.value).partition("--minutes ")[2].partition(",")[0])
    assert fitted(smallest).left_out == ("b", "c")
    with pytest.raises(UserError):
        fitted(smallest - 1)


def test_epochs_that_are_named_stay_and_others_grow_into_minutes_that_are_given() -> None:
    assert fitted(1_000).epochs == 100
    assert fitted(60, may_grow=True).epochs > 150
    assert fitted(10_000, may_grow=True).epochs == MOST * 100
    assert fitted(10_000, may_grow=True, epochs_stay=True).epochs == 100
    with pytest.raises(UserError):
        fitted(29, epochs_stay=True, may_go=[])


def test_fewer_updates_than_enough_are_no_floor_above_what_the_recipe_makes() -> None:
    assert fitted(6, epochs=10).epochs == 10


@pytest.mark.parametrize("minutes", [0, -1, float("inf"), float("nan")])
def test_minutes_are_positive(minutes: float) -> None:
    with pytest.raises(UserError, match="minutes"):
        Question(minutes=minutes)


# ---- a few timed steps ----------------------------------------------------------------------


def on_a_machine(
    monkeypatch: pytest.MonkeyPatch, *, image: float, overhead: float, batch: int
) -> tuple[Trial, list[int]]:
    """Time a recipe on a machine whose steps take ``overhead + batch * image`` seconds."""
    recipe = replace_path(get("digits_vit"), {"data.batch_size": batch})
    clock, batches = [0.0], []

    def step(self: Any, batch: Any) -> None:
        batches.append(len(batch.images))
        clock[0] += overhead + len(batch.images) * image

    monkeypatch.setattr("keymix.train.step.Training.step", step)
    return timed(recipe, load("digits", limit=300), threads=1, clock=lambda: clock[0]), batches


def test_a_quick_step_is_timed_with_full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, batches = on_a_machine(monkeypatch, image=1e-4, overhead=1e-3, batch=64)
    assert trial.step == pytest.approx(0.0074, abs=0.002)  # the last batch is smaller
    assert batches.count(64) >= 5


def test_a_slow_step_is_reckoned_from_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, batches = on_a_machine(monkeypatch, image=0.5, overhead=0.0, batch=128)
    assert trial.step == pytest.approx(64.0)
    assert sum(batches) * 0.5 < 5


def test_a_trial_takes_a_runs_steps_with_its_losses_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terms: list[set[str]] = []
    whole = ClassificationTask.whole

    def diverged(self: Any, loss: torch.Tensor, named: Any) -> torch.Tensor:
        terms.append({*named})
        return whole(self, loss, named) * float("nan")

    monkeypatch.setattr(ClassificationTask, "whole", diverged)
    recipe = replace_path(get("digits_vit"), {"loss.similarity": 0.5, "optim.accumulate": 3})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trial = timed(recipe, load("digits", limit=100), threads=1)
    assert terms == [{"similarity"}] * len(terms) != []
    assert min(trial.step, trial.image) > 0
    assert torch.equal(torch.get_rng_state(), before)


# ---- plans ----------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """Twelve photographs of 220x200 in two classes."""
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.full((200, 220, 3), 40 * i, np.uint8)
            pixels[i] = 0 if name == "cat" else 255
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return f"folder:{tmp_path / 'images'}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine on which a step takes a second per 128x128 pixels; mixers whose steps it timed."""
    tried: list[str] = []

    def steps(recipe: Recipe, *_: object, **__: object) -> Trial:
        tried.append(str(recipe.model.mixer))
        size = recipe.data.image_size
        pixels = math.prod(size) if isinstance(size, tuple) else (size or 12) ** 2
        return Trial(step=pixels / 128**2, image=1e-4)

    monkeypatch.setattr(budget, "timed", steps)
    return tried


def plan_of(question: Question, before: Plan | None = None) -> Plan:
    return resolve(question, before, say=lambda text: None)[0]


def asked(data: str, **more: Any) -> Question:
    return Question(data=data, **({"reference": False, "processes": 1} | more))


def test_ones_own_data_have_half_an_hour_of_which_pixels_give_way_first(
    photos: str, machine: list[str]
) -> None:
    plan = plan_of(asked(photos, mixers="mhsa,ska", controls=False))
    assert plan.recipe.data.image_size == 64
    assert updates(plan.recipe, 9) == 1_000
    (note,) = (each for each in plan.notes if "30 minutes" in each)
    assert "64 pixels" in note
    assert len(plan.seeds) == 3
    assert sum(plan.seconds[label] * 3 for label in plan.labels) + plan.after <= 30 * 60


def test_what_is_named_does_not_give_way(photos: str, machine: list[str]) -> None:
    fast = {"mixers": "mhsa,ska", "controls": False}
    pixels = {"overrides": {"data.image_size": 32}}
    assert plan_of(asked(photos, **fast, **pixels)).recipe.data.image_size == 32
    for named in ({"seeds": 9}, {"mixers": "mhsa,ska,kv,re_attention"}):
        with pytest.raises(UserError, match="--minutes"):
            plan_of(asked(photos, **(fast | named)))
    assert plan_of(asked(photos, **fast, epochs=500)).recipe.schedule.epochs == 500


def test_without_words_mixers_are_left_out_and_baseline_and_control_stay(
    photos: str, machine: list[str]
) -> None:
    plan = plan_of(asked(photos, minutes=45))
    assert {"softmax", "identity"} < {*plan.labels}
    assert 3 <= len(plan.labels) < 6
    assert "without " in plan.notes[0]


def test_large_images_get_more_pixels_where_minutes_allow_it(
    photos: str, machine: list[str]
) -> None:
    assert plan_of(asked(photos, minutes=2_000)).recipe.data.image_size == 224
    assert plan_of(asked(photos, minutes=500)).recipe.data.image_size == 128


def test_only_a_comparison_that_names_nothing_is_kept_small(machine: list[str]) -> None:
    first = plan_of(Question(processes=1))
    assert first.labels == ("softmax", "static_key", "identity")
    assert len(plan_of(Question(processes=1, seeds=5), first).pairs) == 15
    of_data = plan_of(Question(data="digits", processes=1))
    assert {"re_attention", "plain network"} < {*of_data.labels}
    assert plan_of(Question(mixers="mhsa,kv", processes=1)).labels[-1] == "plain network"


def test_a_bundled_default_and_a_named_recipe_have_no_bound(machine: list[str]) -> None:
    for more in ({}, {"recipe": "digits_vit", "overrides": {"schedule.epochs": 9_000}}):
        plan = plan_of(Question(**more, reference=False, processes=1))
        assert not any("minutes" in note for note in plan.notes)


def test_a_plan_is_made_once_and_seeds_and_mixers_grow(photos: str, machine: list[str]) -> None:
    first = plan_of(asked(photos, minutes=45))
    machine.clear()
    again = plan_of(asked(photos, minutes=45, seeds=5), first)
    assert machine == []
    assert (again.recipe, again.labels, again.notes) == (first.recipe, first.labels, first.notes)
    assert again.seeds == (0, 1, 2, 3, 4)
    unnamed = plan_of(asked(photos), first)
    assert plan_of(asked(photos, minutes=45), unnamed).recipe == first.recipe
    grown = plan_of(asked(photos, mixers="mhsa,pooling"), first)
    assert grown.recipe == first.recipe
    assert machine == ["pooling"]
    other = plan_of(asked(photos, minutes=200), first)
    assert other.recipe != first.recipe


@pytest.mark.slow
def test_a_comparison_follows_the_plan_that_its_folder_has(
    photos: str, machine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "AIM", 20)
    out = tmp_path / "out"
    call = {"data": photos, "controls": False, "limit": None, "epochs": None}
    pixels = {"overrides": {"data.image_size": 12}}
    small(out, **call, **pixels)
    plan = read(out).plan
    assert updates(plan.recipe, 9) == 20
    machine.clear()
    monkeypatch.setattr(defaults, "AIM", 40)
    small(out, **call, **pixels)
    assert read(out).plan.recipe == plan.recipe
    assert machine == []


# ---- the time left --------------------------------------------------------------------------


def test_the_time_left_follows_the_pace_of_all_epochs_so_far() -> None:
    now = [100.0]
    left = Remaining(clock=lambda: now[0])
    left.see(Event(kind="plan", done=1, total=3))
    left.see(Event(kind="start", mixer="a"))
    assert left.seconds() is None
    now[0] += 20
    left.see(Event(kind="epoch", mixer="a", epoch=1, epochs=4))  # a quarter of one of two runs
    assert left.seconds() == pytest.approx(20 / 0.25 * 1.75)
    now[0] += 20
    left.see(Event(kind="done", mixer="a"))
    assert left.seconds() == pytest.approx(40)
    left.see(Event(kind="failed", mixer="b"))
    assert left.seconds() == 0


def test_a_run_that_resumes_counts_only_what_it_does_now() -> None:
    now = [0.0]
    left = Remaining(clock=lambda: now[0])
    left.see(Event(kind="plan", total=1))
    now[0] = 1.0
    left.see(Event(kind="start", mixer="a"))
    now[0] = 6.0
    left.see(Event(kind="epoch", mixer="a", epoch=8, epochs=10))
    assert left.seconds() == pytest.approx(10)


def test_piped_it_prints_the_estimate_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [1.0]
    lines = Lines(clock=lambda: now[0])
    lines(Event(kind="plan", total=2))
    lines(Event(kind="estimate", text="about 3 min"))
    lines(Event(kind="start", mixer="a"))
    now[0] = 101.0
    lines(Event(kind="epoch", mixer="a", epoch=1, epochs=1))
    lines(Event(kind="done", mixer="a"))
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["2 runs", "about 3 min"]
    assert printed[-1] == "1/2 done: a, seed 0; about 1 min 40 s left"


def test_piped_it_gives_a_sign_of_life_where_no_run_ends_for_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    lines = Lines(clock=lambda: now[0])
    lines(Event(kind="plan", total=2))
    for done, at in ((1, 59.0), (2, 61.0), (3, 119.0), (4, 122.0)):
        now[0] = at
        more = {"epoch": done, "epochs": 9, "text": "accuracy", "shown": "93.1 %"}
        lines(Event(kind="epoch", mixer="a", **more))
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(" of 9")[0] for line in printed[1:]] == [
        "a, seed 0: epoch 2",
        "a, seed 0: epoch 4",
    ]
    assert "93.1 %" in printed[1]
