# SPDX-License-Identifier: Apache-2.0
"""What tests of a task of one's own share: stop and resume, a comparison of seconds, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import keymix
from keymix.analysis.certainty import Certainty, Evidence, judge
from keymix.analysis.statistics import Crossed, Interval
from keymix.compare.run import Comparison
from keymix.task import get_task
from keymix.train.recipe import Recipe
from keymix.train.task import TrainingTask


def check_resume(recipe: Recipe, folder: Path, *, weights: int) -> None:
    """Stop a run within each of its epochs; it ends with the weights of one that was not stopped.

    Args:
        recipe: The run, of two epochs.
        folder: For the runs.
        weights: Epochs within which it is stopped.
    """
    whole = keymix.train(recipe, folder / "whole")
    step = TrainingTask.training_step
    for _ in range(weights):
        steps = 0

        def stopped(self: TrainingTask, batch: Any, number: int) -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                raise KeyboardInterrupt
            return step(self, batch, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainingTask, "training_step", stopped)
            with pytest.raises(KeyboardInterrupt):
                keymix.train(recipe, folder / "stopped", checkpoint_minutes=0)
        assert not keymix.load_run(folder / "stopped").done
    resumed = keymix.train(recipe, folder / "stopped")
    (ours, _), (theirs, _) = resumed.weights(), whole.weights()
    assert all(bool((ours[name] == tensor).all()) for name, tensor in theirs.items())
    assert resumed.summary.last == whole.summary.last
    lines = [
        [{**line, "seconds": 0, "images_per_s": 0} for line in run.metrics()]
        for run in (resumed, whole)
    ]
    assert lines[0] == lines[1]


@contextmanager
def registered(register: Callable[[], None]) -> Iterator[None]:
    """Register a task and its data, and forget them afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keymix.task._OWN", {})
        patch.setattr("keymix.data.specs._OWN", {})
        register()
        yield


def compared(recipe: Recipe, out: Path, file: str, *, processes: int = 1) -> Comparison:
    """Compare two mixers at two seeds."""
    found: Comparison = keymix.compare(
        recipe=recipe,
        mixers="softmax,identity",
        seeds=2,
        out=out,
        imports=[file],
        processes=processes,
        reference=False,
    )
    assert not found.failed
    return found


def judged_difference(task: str, difference: float) -> Certainty:
    """Judge a mixer whose score differs so much from the baseline's, beyond chance."""
    sure = Crossed(
        mean=difference,
        seeds=30,
        units=30,
        var_seeds=1e-4 * difference**2,
        var_units=1e-4 * difference**2,
        var_rest=0.0,
    )
    found = Evidence(
        crossed=sure,
        by_seed=[difference] * 30,
        seeds=Interval(n=30, difference=difference, low=None, high=None, p=None),
        units=None,
    )
    return judge({"one": found}, score=get_task(task).score)["one"]
