# SPDX-License-Identifier: Apache-2.0
"""How long a comparison will take: from trials, given before the runs, updated while they train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from few_digits import brittle, small
from keymix.compare.eta import Estimate, Trial, side_by_side, try_out

from keymix.cli.comparison import Lines
from keymix.compare.events import Event, Remaining
from keymix.data import load
from keymix.recipes import get
from keymix.tasks.classification.training import ClassificationTask
from keymix.train.callbacks import roughly
from keymix.train.recipe import replace_path


@pytest.fixture(scope="module", autouse=True)
def _no_trials() -> None:
    """Here there are trials."""


def test_a_run_is_its_steps_its_validation_and_twice_the_test():
    recipe = get("digits_vit")
    recipe = replace(
        recipe,
        data=replace(recipe.data, batch_size=64),
        schedule=replace(recipe.schedule, epochs=10, warmup_epochs=0),
    )
    trial = Trial(step=1.0, image=0.01, epoch=0.5)
    sizes = {"train": 129, "val": 100, "test": 1000}
    assert trial.run(recipe, sizes) == pytest.approx(10 * (3 * 1.0 + 1.0 + 0.5) + 20)
    assert trial.run(recipe, sizes, epochs_done=9) == pytest.approx(4.5 + 20)


def test_runs_go_to_the_process_that_is_free_first():
    assert side_by_side([3, 1, 1, 1], 1) == 6
    assert side_by_side([3, 1, 1, 1], 2) == 3
    assert side_by_side([1, 1, 1, 3], 2) == 4
    assert side_by_side([2], 2, [5, 1]) == 5
    assert side_by_side([], 3) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"), (7.4, "7 s"), (43, "45 s"), (96, "1 min 40 s"), (118, "2 min"),
        (297, "5 min"), (1440, "24 min"),
        (3600, "1 h"), (4000, "1 h 5 min"), (40_000, "11 h"),
    ],
)  # fmt: skip
def test_durations_are_no_more_precise_than_an_estimate(seconds, text):
    assert roughly(seconds) == text


def tried(monkeypatch, *, image_seconds: float, overhead: float, batch: int) -> tuple[Trial, list]:
    """Try a recipe out on a machine whose steps take ``overhead + batch * image_seconds``."""
    data = load("digits", limit=300)
    recipe = get("digits_vit")
    recipe = replace(recipe, data=replace(recipe.data, batch_size=batch))
    clock, batches = [0.0], []

    def step(self: Any, batch: Any) -> None:
        batches.append(len(batch.images))
        clock[0] += overhead + len(batch.images) * image_seconds

    monkeypatch.setattr("keymix.train.step.Training.step", step)
    return try_out(recipe, data, runs=3, clock=lambda: clock[0]), batches


def test_a_quick_step_is_timed_with_full_batches(monkeypatch):
    trial, batches = tried(monkeypatch, image_seconds=1e-4, overhead=1e-3, batch=64)
    assert trial.step == pytest.approx(0.0074, abs=0.002)
    assert batches.count(64) >= 5


def test_a_slow_step_is_reckoned_from_small_batches(monkeypatch):
    trial, batches = tried(monkeypatch, image_seconds=0.5, overhead=0.3, batch=128)
    assert trial.step == pytest.approx(0.3 + 64.0, abs=0.01)
    assert sum(batches) * 0.5 + len(batches) * 0.3 < 12  # and not minutes
    assert max(batches) < 16


def test_a_trial_takes_a_runs_steps_with_its_losses_and_continues_with_any(monkeypatch):
    terms: list[set[str]] = []
    whole = ClassificationTask.whole

    def diverged(self: Any, loss: torch.Tensor, named: Any) -> torch.Tensor:
        terms.append({*named})
        return whole(self, loss, named) * float("nan")

    monkeypatch.setattr(ClassificationTask, "whole", diverged)
    recipe = replace_path(get("digits_vit"), {"loss.similarity": 0.5, "optim.accumulate": 3})
    clock = iter(range(10_000))
    trial = try_out(recipe, load("digits", limit=100), runs=1, clock=lambda: next(clock))
    assert len(terms) > 1
    assert all(named == {"similarity"} for named in terms)
    assert trial.step > 0


def test_a_trial_leaves_no_trace(tmp_path):
    data, recipe = load("digits", limit=200), get("digits_vit")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trial = try_out(recipe, data, runs=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert trial.step > 0
    assert trial.image > 0


def watched(out: Path, **more: Any) -> list[Event]:
    events: list[Event] = []
    small(out, progress=events.append, **more)
    return events


@pytest.mark.slow
def test_it_is_given_before_the_first_run_and_not_when_all_are_done(tmp_path, monkeypatch):
    steady = Trial(step=0.1, image=0.001, epoch=0.1)
    monkeypatch.setattr("keymix.compare.eta.try_out", lambda *args, **more: steady)
    events = watched(tmp_path / "out", controls=False, seeds=2)
    kinds = [event.kind for event in events]
    assert kinds.index("plan") < kinds.index("estimate") < kinds.index("start")
    (event,) = [event for event in events if event.kind == "estimate"]
    assert event.text.startswith("about ")
    assert "4 runs" in event.text
    estimate = event.estimate
    assert list(estimate.runs) == [
        ("softmax", 0), ("static_key", 0), ("softmax", 1), ("static_key", 1),
    ]  # fmt: skip
    assert set(estimate.runs.values()) == set(estimate.whole.values())
    assert len(set(estimate.whole.values())) == 1
    again = [event.kind for event in watched(tmp_path / "out", controls=False, seeds=2)]
    assert "estimate" not in again
    more = watched(tmp_path / "out", controls=False, seeds=3)
    (event,) = [event for event in more if event.kind == "estimate"]
    assert list(event.estimate.runs) == [("softmax", 2), ("static_key", 2)]
    assert event.estimate.after < estimate.after  # costs are measured already


@pytest.mark.slow
def test_a_mixer_that_breaks_is_left_out_of_the_estimate(tmp_path):
    path = brittle(tmp_path, "untimed", 'raise RuntimeError("no step of mine")')
    events = watched(
        tmp_path / "out", mixers="brittle_untimed,mhsa", controls=False, imports=[path]
    )
    (event,) = [event for event in events if event.kind == "estimate"]
    assert list(event.estimate.whole) == ["softmax"]
    assert [event.mixer for event in events if event.kind == "failed"] == ["brittle_untimed"]


@pytest.mark.slow
def test_side_by_side_it_is_given_once_and_a_worker_that_dies_takes_one_run_with_it(tmp_path):
    path = brittle(tmp_path, "exits", "import os; os._exit(7)")
    events: list[Event] = []
    result = small(
        tmp_path / "out",
        progress=events.append,
        mixers="brittle_exits,mhsa,ska",
        controls=False,
        imports=[path],
        processes=2,
    )
    (event,) = [event for event in events if event.kind == "estimate"]
    assert set(event.estimate.whole) == {"softmax", "static_key"}
    assert sorted(event.mixer for event in events if event.kind == "done") == [
        "softmax", "static_key",
    ]  # fmt: skip
    assert [event.mixer for event in events if event.kind == "failed"] == ["brittle_exits"]
    (failed,) = result.failed
    assert failed.mixer == "brittle_exits"
    assert "code 7" in failed.reason
    assert [row.scores["top1"].n for row in result.record.outcome.last] == [0, 1, 1]


def following(processes: int = 2) -> tuple[Remaining, list[float]]:
    clock = [0.0]
    runs = {(mixer, seed): 100.0 for seed in (0, 1) for mixer in ("a", "b")}
    estimate = Estimate(runs=runs, whole={"a": 100.0, "b": 100.0}, after=10.0, processes=processes)
    return Remaining(estimate, clock=lambda: clock[0]), clock


def test_the_time_left_starts_as_the_estimate_and_runs_down():
    remaining, clock = following()
    assert remaining.seconds() == 210
    for mixer in ("a", "b"):
        remaining.see(Event(kind="start", mixer=mixer))
    assert remaining.seconds() == 210
    clock[0] = 30.0
    assert remaining.seconds() == 180


def test_the_time_left_follows_what_was_seen():
    remaining, clock = following()
    for mixer in ("a", "b"):
        remaining.see(Event(kind="start", mixer=mixer))
    for epoch in (1, 2):  # every epoch takes 20 seconds, twice as long as was thought
        clock[0] = 20.0 * epoch
        for mixer in ("a", "b"):
            remaining.see(Event(kind="epoch", mixer=mixer, epoch=epoch, epochs=10))
    assert remaining.seconds() == pytest.approx(8 * 20 + 10 * 20 + 10)
    clock[0] += 5
    assert remaining.seconds() == pytest.approx(8 * 20 + 10 * 20 + 10 - 5)
    for mixer in ("a", "b"):
        remaining.see(Event(kind="done", mixer=mixer))
    assert remaining.seconds() == pytest.approx(200 + 10)


def test_a_run_that_started_before_the_estimate_is_followed_too():
    remaining, clock = following(processes=1)
    for epoch in (1, 2):
        clock[0] = 10.0 * epoch
        remaining.see(Event(kind="epoch", mixer="a", epoch=epoch, epochs=10))
    assert remaining.seconds() == pytest.approx(80 + 300 + 10)
    remaining.see(Event(kind="done", mixer="a"))
    remaining.see(Event(kind="failed", mixer="b"))
    assert remaining.seconds() == pytest.approx(200 + 10)


def test_mixers_not_seen_yet_are_as_slow_as_the_others():
    remaining, clock = following(processes=1)
    remaining.see(Event(kind="start", mixer="a"))
    for epoch in (1, 2):
        clock[0] = 30.0 * epoch
        remaining.see(Event(kind="epoch", mixer="a", epoch=epoch, epochs=10))
    assert remaining.seconds() == pytest.approx(8 * 30 + 3 * 300 + 10)


def test_piped_it_prints_the_estimate_and_the_time_left(capsys):
    lines = Lines()
    estimate = Estimate(
        runs={("a", 0): 100.0, ("b", 0): 100.0}, whole={"a": 100.0, "b": 120.0}, after=10.0,
        processes=1,
    )  # fmt: skip
    lines(Event(kind="plan", total=2))
    lines(Event(kind="estimate", text=estimate.text(), estimate=estimate))
    lines(Event(kind="start", mixer="a"))
    lines(Event(kind="done", mixer="a"))
    printed = capsys.readouterr().err.splitlines()
    assert printed == [
        "2 runs",
        "about 3 min 30 s (2 runs, up to 2 min each for b; then 10 s for costs and maps)",
        "1/2 done: a, seed 0; about 1 min 50 s left",
    ]


def test_piped_it_gives_a_sign_of_life_where_no_run_ends_for_a_minute(capsys):
    now = 0.0
    lines = Lines(clock=lambda: now)
    lines(Event(kind="plan", total=2))
    epoch = Event(kind="epoch", mixer="a", epochs=9, text="accuracy", shown="93.1 %")
    for done, now in ((1, 59.0), (2, 61.0), (3, 119.0), (4, 122.0)):  # noqa: B007
        lines(replace(epoch, epoch=done))
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(" of 9")[0] for line in printed[1:]] == [
        "a, seed 0: epoch 2",
        "a, seed 0: epoch 4",
    ]
    assert "93.1 %" in printed[1]
