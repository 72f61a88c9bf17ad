# SPDX-License-Identifier: Apache-2.0
"""A task of one's own, a number for each image, and a comparison's record of it, made up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from synthetic import make_record

from keymix import task as tasks
from keymix.analysis.answers import Answers, Arrays, FloatArray, IntArray
from keymix.compare.results import outcome
from keymix.compare.runs import Scores
from keymix.records import to_json
from keymix.task import Score, Task, register_task
from keymix.train.parts import AnswersPart, Evaluated

ERRORS = {"softmax": 2.41, "static_key": 2.3, "key_value": 2.9, "identity": 9.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers(Answers):
    """A number for each image."""

    index: IntArray
    target: FloatArray
    predicted: FloatArray

    @property
    def units(self) -> int:
        return len(self.index)

    def score(self, weights: FloatArray) -> FloatArray:
        errors = np.abs(self.target - self.predicted)
        return np.asarray(weights @ errors / weights.sum(axis=1))

    def shared(self) -> Arrays:
        return {"index": self.index, "target": self.target}

    def arrays(self, which: str) -> Arrays:
        return {f"{which}_predicted": self.predicted}

    def same_truth(self, other: Answers) -> bool:
        return isinstance(other, Numbers) and np.array_equal(self.target, other.target)


class NumbersPart(AnswersPart):
    """How numbers are read: the interval over images is the jackknife."""

    def evaluated(self, *args: Any, **kwargs: Any) -> Evaluated:
        raise NotImplementedError

    def read(self, stored: Arrays, which: str, data: Any) -> Numbers:
        raise NotImplementedError


NUMBERS = Task(
    name="numbers",
    does="predicts a number",
    holds="images with a number each",
    scores=(
        Score(
            key="mae",
            name="mean absolute error",
            short="MAE",
            label="error",
            better="less",
            high=None,
            unit="mm",
        ),
        Score(key="r2", name="R²", short="R²", label="R²", low=None, high=1.0, unit=""),
    ),
    validation_loss=False,
    training="",
    answers=NumbersPart(),
)


@contextmanager
def registered(task: Task = NUMBERS) -> Iterator[Task]:
    """Know the task as long as the block runs."""
    register_task(task)
    try:
        yield task
    finally:
        tasks._OWN.pop(task.name)


def made_scores(seeds: int, images: int = 200) -> Mapping[str, Mapping[int, Scores]]:
    rng = np.random.default_rng(0)
    target = rng.normal(50, 9, images)
    table: dict[str, dict[int, Scores]] = {label: {} for label in ERRORS}
    for label, error in ERRORS.items():
        for seed in range(seeds):
            off = error * rng.choice((-1, 1), images) * rng.uniform(0.7, 1.3, images)
            answers = Numbers(index=np.arange(images), target=target, predicted=target + off)
            mae = float(np.abs(off).mean())
            table[label][seed] = Scores(val=mae, test={"mae": mae, "r2": 0.5}, answers=answers)
    return table


def make_number_record(seeds: int = 5) -> dict[str, Any]:
    """Make a record of the task; it must be registered."""
    record = make_record(seeds, accuracy=ERRORS)
    scores = made_scores(seeds)
    for run in record["runs"]:
        found = scores[run["mixer"]][run["seed"]]
        for key in ("correct", "class_correct"):
            del run[key]
        for entry in run["history"]:
            entry["val_mae"] = entry.pop("val_top1") * 10
            del entry["val_loss"]
        for which in ("last", "best"):
            run[which] = {"epoch": 12, "val": {"mae": found.val}, "test": dict(found.test)}
    labels = list(ERRORS)
    rows = outcome(labels, baseline=labels[0], scores=scores, task=NUMBERS)
    as_json = to_json(rows)
    for key in ("classes", "confusions"):
        del record[key]
    return record | {
        "outcome": {"last": as_json, "best": as_json},
        "data": record["data"] | {"task": NUMBERS.name},
    }
