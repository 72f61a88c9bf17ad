# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a training: its plan, a line per epoch, signs of life, the time left."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from keymix.task import get_task
from keymix.train.callbacks import Callback, Display, Pace, TrainingPlan
from keymix.train.engine import train
from keymix.train.recipe import Recipe, replace_path


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def planned(tiny: Recipe, **given: Any) -> TrainingPlan:
    known = {"steps": 100, "done": 0, "lines": (), "params": 2_300_000, "sizes": (1600, 10, 20)}
    return TrainingPlan(
        **known | given,
        folder=Path(),
        recipe=tiny,
        task=get_task("classification"),
        items="images",
        device="cpu",
    )


def line(epoch: int) -> dict[str, float | None]:
    scores = {"val_loss": 0.5, "val_top1": 0.75, "val_top5": 1.0}
    rest = {"epochs": 3, "train_loss": 0.25, "lr": 1e-3, "seconds": 30.0, "images_per_s": 1234.0}
    return {"epoch": epoch, **scores, **rest}


def test_over_a_pipe_long_epochs_get_a_line_per_minute(tiny: Recipe) -> None:
    clock, said = Clock(), StringIO()
    shown = Display(Console(file=said), clock=clock)
    shown.on_train_start(planned(tiny))
    for step in range(1, 101):
        clock.now += 1.5
        shown.on_step_end(step, 2.0)
    shown.on_epoch_end(line(0))
    shown.close()
    plan, first, second, epoch = said.getvalue().splitlines()
    assert "1,600 images" in plan
    assert "2.30 M" in plan
    assert first.startswith("epoch 1/3  step 40/100  train loss 2.0000  11 images/s")
    assert "about 6 min left" in first  # 260 steps of 1.5 s are 6 min 30 s
    assert second.startswith("epoch 1/3  step 80/100")
    assert epoch.startswith("epoch 1/3  train loss 0.2500")
    assert "75.00%" in epoch
    assert "about 5 min left" in epoch  # 200 steps


def test_at_a_terminal_the_epochs_stay_above_the_bar(tiny: Recipe) -> None:
    said = StringIO()
    console = Console(file=said, force_terminal=True, width=100, highlight=False)
    shown = Display(console)
    shown.on_train_start(planned(tiny))
    shown.on_step_end(1, 2.5)
    assert shown._bar is not None
    shown._bar.refresh()
    assert "loss 2.5000" in said.getvalue()
    shown.on_epoch_end(line(0))
    shown.close()
    left_on_screen = said.getvalue().rpartition("\x1b[2K")[0]
    assert "epoch 1/3  train loss 0.2500" in left_on_screen


def test_resumed_run_says_where_it_goes_on(tiny: Recipe) -> None:
    assert planned(tiny, done=100).sentence().endswith("resumed at epoch 2")
    assert planned(tiny, done=142).sentence().endswith("resumed at epoch 2, step 43")
    assert "resumed" not in planned(tiny, done=300).sentence()


def test_one_epoch_of_one_step_is_no_plural(tiny: Recipe) -> None:
    short = replace_path(tiny, {"schedule.epochs": 1, "schedule.warmup_epochs": 0})
    assert "1 epoch of 1 step of 16 on cpu" in planned(short, steps=1).sentence()


def test_time_left_is_corrected_by_what_was_seen() -> None:
    clock = Clock()
    pace = Pace(100, clock=clock)
    assert pace.left() == ""
    clock.now = 50.0  # a slow start, such as a compilation, is left out
    pace.see(1)
    assert pace.left() == ""
    clock.now = 51.0
    pace.see(2)
    assert pace.left() == "about 1 min 40 s left"  # 98 steps
    clock.now = 60.0 + 38.0  # a validation of 38 s
    pace.see(11)
    assert pace.left() == "about 7 min left"  # 89 steps at 10 in 48 s
    pace.see(100)
    assert pace.left() == ""


class Noting(Callback):
    """Keeps the order in which a training calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []

    def on_train_start(self, plan: TrainingPlan) -> None:
        self.calls.append(f"begin {plan.done}/{plan.steps * plan.epochs}")

    def on_step_end(self, done: int, loss: float) -> None:
        self.calls.append(f"step {done}")
        self.losses.append(loss)

    def on_validation_start(self) -> None:
        self.calls.append("validating")

    def on_epoch_end(self, line: Mapping[str, float | None]) -> None:
        self.calls.append(f"epoch {line['epoch']}")
        self.losses.append(float(line["train_loss"] or 0))

    def on_test_end(self, record: Any) -> None:
        self.calls.append(record.status)

    def close(self) -> None:
        self.calls.append("end")


def test_training_calls_its_watcher_in_order(vary: Any, tmp_path: Path) -> None:
    seen = Noting()
    recipe = vary({"schedule.epochs": 2})
    train(recipe, tmp_path / "run", progress=seen)
    steps = (len(seen.calls) - 7) // 2
    assert seen.calls == [
        f"begin 0/{2 * steps}",
        *(f"step {done}" for done in range(1, steps + 1)),
        "validating",
        "epoch 0",
        *(f"step {done}" for done in range(steps + 1, 2 * steps + 1)),
        "validating",
        "epoch 1",
        "done",
        "end",
    ]
    assert seen.losses[steps] == pytest.approx(seen.losses[steps - 1])  # the epoch's mean loss
    assert torch.tensor(seen.losses).isfinite().all()


def test_watcher_is_cleared_up_after_a_stop(vary: Any, tmp_path: Path) -> None:
    class Stopping(Noting):
        def on_validation_start(self) -> None:
            raise KeyboardInterrupt

    seen = Stopping()
    with pytest.raises(KeyboardInterrupt):
        train(vary({}), tmp_path / "run", progress=seen)
    assert seen.calls[-1] == "end"
