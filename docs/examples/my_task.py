"""A task of your own in one file: a number per image, here the value of a digit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import keymix
from keymix.analysis.answers import Answers
from keymix.data.sources import digits
from keymix.task import Score, Task
from keymix.train.parts import AnswersPart, Evaluated, Prediction, TrainingPart
from keymix.train.task import StepLoss, TrainingTask

# 1. The facts: how models are compared. Less error is better, and it has no upper bound.
TASK = Task(
    name="value",
    does="estimates a value",
    holds="images with a value each",
    scores=(
        Score(
            key="mae",
            name="mean absolute error",
            short="MAE",
            label="error",
            better="less",
            high=None,
            unit="",
        ),
    ),
    models="classification",  # a classifier's head with one output serves
    recipes={"": "digits_vit"},
    training=f"{__name__}:TRAINING",
    answers=f"{__name__}:ANSWERS",
)


# 2. The training: one output, and its squared error.
class Values(TrainingTask):
    """Squared error of one output."""

    def step_loss(self, images: Any, targets: torch.Tensor) -> StepLoss:
        """Return the loss that is recorded, and that which is derived."""
        found = self.trained(images).float().squeeze(1)
        loss = F.mse_loss(found, targets.float())
        return StepLoss(recorded=loss, trained=loss)


class ValueTraining(TrainingPart):
    """How values are learned."""

    module = Values

    def outputs(self, data: Any) -> int:
        """One output per image."""
        return 1


TRAINING = ValueTraining()


# 3. The answers: what one evaluated split leaves, and its score.
@dataclass(frozen=True, kw_only=True, eq=False)
class ValueAnswers(Answers):
    """Estimated and true values of a split."""

    index: np.ndarray
    target: np.ndarray
    found: np.ndarray

    @property
    def units(self) -> int:
        """Images are what chance is of."""
        return len(self.index)

    def score(self, weights: np.ndarray) -> np.ndarray:
        """Mean absolute error with weighted images, [R, U] -> [R]."""
        return weights @ np.abs(self.found - self.target) / weights.sum(1)

    def shared(self) -> dict[str, np.ndarray]:
        """Arrays that are the same whatever weights answered."""
        return {"index": self.index, "target": self.target}

    def arrays(self, which: str) -> dict[str, np.ndarray]:
        """Arrays of one set of weights."""
        return {f"{which}_found": self.found}

    def same_truth(self, other: Answers) -> bool:
        """Whether two models were asked the same."""
        return isinstance(other, ValueAnswers) and np.array_equal(self.target, other.target)


@dataclass(frozen=True, kw_only=True)
class Value(Prediction):
    """The value of a file."""

    value: float = float("nan")


class ValuesAnswered(AnswersPart):
    """How estimates are evaluated, kept and read."""

    prediction = Value

    def evaluated(self, outputs: Iterable[Any], split: Any, data: Any, device: Any) -> Evaluated:
        """Score what the model gives for every batch of a split."""
        parts = [
            (batch.index.cpu(), batch.targets.cpu(), output.float().squeeze(1).cpu())
            for batch, output in outputs
        ]
        index, target, found = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        own = ValueAnswers(index=index, target=target, found=found.astype(np.float64))
        answers = self.joined(own, data)  # those of all devices, if a training has several
        error = float(np.abs(answers.found - answers.target).mean())
        loss = float(np.square(answers.found - answers.target).mean())
        return Evaluated(scores={"loss": loss, "mae": error}, answers=answers)

    def read(self, stored: Any, which: str, data: Any) -> ValueAnswers:
        """Read what `shared` and `arrays` stored."""
        order = np.argsort(stored["index"])
        names = {"index": "index", "target": "target", "found": f"{which}_found"}
        return ValueAnswers(**{field: stored[name][order] for field, name in names.items()})

    def predictions(self, outputs: Any, paths: Any, seen: Any, *, top: int) -> Iterator[Value]:
        """Estimate the values of files."""
        for path, value in zip(paths, outputs.float().squeeze(1).tolist(), strict=True):
            yield Value(path=path, value=value)


ANSWERS = ValuesAnswered()
keymix.register_task(TASK)


# 4. The data: here the digits, whose labels are the values.
@keymix.source("digit_values", summary="scikit-learn's digits, each with its value", task=TASK.name)
def digit_values(argument: str, faults: Any) -> Any:
    """List the digits."""
    source = digits.open_digits(argument, faults)
    return replace(source, notes=(*source.notes, "the class of a digit is its value"))
