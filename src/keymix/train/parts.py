# SPDX-License-Identifier: Apache-2.0
"""What a task brings to training and evaluation: the two parts that are opened by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from keymix.analysis import passes
from keymix.analysis.answers import Answers, Arrays
from keymix.analysis.passes import Inputs
from keymix.analysis.statistics import Interval, over_units
from keymix.data.record import DataRecord
from keymix.task import Task
from keymix.train.scoring import ImageBatch

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split
    from keymix.train.distill import Teacher
    from keymix.train.nonfinite import Losses
    from keymix.train.recipe import Recipe
    from keymix.train.task import TrainingTask


class TrainingPart(ABC):
    """How a task is trained."""

    def outputs(self, data: DataRecord) -> int:
        """Outputs of the model's head; one a class unless the task says otherwise."""
        return len(data.classes)

    def check(self, recipe: Recipe) -> None:
        """Refuse what a recipe asks and the task does not have.

        Raises:
            UserError: Naming the field.
        """
        del recipe

    @abstractmethod
    def make(
        self,
        recipe: Recipe,
        model: nn.Module,
        data: ImageData,
        *,
        steps: int,
        losses: Losses,
        teacher: Teacher | None,
    ) -> TrainingTask:
        """Make what a run trains.

        Args:
            recipe: The run.
            model: Built by the recipe.
            data: Its images.
            steps: Batches of an epoch.
            losses: Keeps the training losses.
            teacher: Whose answers are learned too, where the recipe has that term.
        """

    def example(self, shape: tuple[int, ...], batch_size: int) -> Inputs:
        """Make a batch of inputs for counting and measuring: standard normal numbers.

        Args:
            shape: Of one input, such as (C, H, W).
            batch_size: How many.
        """
        return passes.normal_inputs(shape, batch_size)

    def training_pass(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Run the forward pass of a training step on an example and return a number to derive.

        What a step's loss is does not matter for its cost, so outputs are squared and averaged. A
        task overrides this where a model in training mode takes the targets as well.
        """
        return passes.squared_outputs(model, inputs)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What an evaluation found.

    Args:
        scores: By the keys of the task's scores, and ``loss``; None where one is not defined.
        answers: What the model answered.
        own: What the task tells besides, a dataclass; None for nothing.
    """

    scores: Mapping[str, float | None]
    answers: Answers
    own: object | None = None


class AnswersPart(ABC):
    """How a task's models are evaluated, what is kept of that, and how two are compared."""

    @abstractmethod
    def evaluate(
        self,
        model: nn.Module,
        batches: Iterable[ImageBatch],
        split: Split,
        data: ImageData,
        *,
        device: torch.device,
        precision: str,
    ) -> Evaluated:
        """Answer every input of a split and score the answers.

        Args:
            model: Put into eval mode, on the device.
            batches: The split, on the device.
            split: The split.
            data: The data set.
            device: Where to compute.
            precision: As in a recipe.
        """

    @abstractmethod
    def read(self, stored: Arrays, which: Literal["last", "best"], data: DataRecord) -> Answers:
        """Read answers that `Answers.shared` and `Answers.arrays` stored.

        Args:
            stored: Arrays by name, without `faults`.
            which: Weights of the ``last`` or the ``best`` epoch.
            data: The record of the data.
        """

    @abstractmethod
    def faults(self, stored: Arrays, data: DataRecord) -> Iterator[str]:
        """Say what is wrong with stored arrays, the first fault first; nothing if they are whole.

        Args:
            stored: Arrays by name, as a file had them.
            data: The record of the data.
        """

    def interval(
        self, task: Task, mixer: Mapping[int, Answers], baseline: Mapping[int, Answers]
    ) -> Interval | None:
        """Compare two mixers over the units of the test split, at the seeds that both finished.

        The delete-one jackknife of `keymix.analysis.statistics.over_units`, unless a task has a
        closed form.

        Args:
            task: The task, for unit and bounds.
            mixer: Answers of the mixer's models by seed.
            baseline: Those of the baseline's.
        """
        return over_units(mixer, baseline, score=task.score, unit=task.unit)

    def references(self, data: ImageData) -> Mapping[str, Evaluated]:
        """Cheap answers to the test split that no model is needed for, by what they are.

        Such as the class that is most frequent in training, for every image.
        """
        del data
        return {}


def training_of(task: Task) -> TrainingPart:
    """Open a task's training."""
    return cast(TrainingPart, task.load("training"))


def answers_of(task: Task) -> AnswersPart:
    """Open a task's answers."""
    return cast(AnswersPart, task.load("answers"))
