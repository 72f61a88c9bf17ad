# SPDX-License-Identifier: Apache-2.0
"""What a task brings to training and evaluation: the two parts that are opened by its name."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from keymix.analysis import passes
from keymix.analysis.answers import Answers, Arrays, FloatArray, whole
from keymix.analysis.passes import Inputs
from keymix.analysis.statistics import Interval, over_units
from keymix.data.decode import Pixels
from keymix.data.record import DataRecord
from keymix.data.specs import Setting, task_name
from keymix.errors import UserError, require
from keymix.records import to_json
from keymix.task import Score, Task, get_task
from keymix.train import ranks
from keymix.train.scoring import Flips, ImageBatch, Outputs, answered

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split
    from keymix.train.losses import Teacher
    from keymix.train.nonfinite import Losses
    from keymix.train.recipe import Recipe
    from keymix.train.record import SplitScores
    from keymix.train.task import TrainingTask


OF_CLASSES = ("label_smoothing", "mixup", "cutmix", "similarity", "distill")
"""Losses of a recipe, or what softens their targets, of classes of whole images."""


class TrainingPart:
    """How a task is trained.

    Attributes:
        module: The `keymix.train.task.TrainingTask` that says what the loss of a step is.
        losses: Those of `OF_CLASSES` that it takes.
        dense: What a model is called that reads every token out, such as ``segmenter``, and so has
            no pooled readout; empty where models may pool.
    """

    module: type[TrainingTask]
    losses: frozenset[str] = frozenset()
    dense: str = ""

    def outputs(self, data: DataRecord) -> int:
        """Outputs of the model's head; one per class unless the task says otherwise."""
        return len(data.classes)

    def arguments(self, data: DataRecord) -> Mapping[str, bool]:
        """Further arguments of the model that the data decide; none unless the task says so."""
        del data
        return {}

    def check(self, recipe: Recipe) -> None:
        """Refuse what a recipe asks and the task does not have.

        Raises:
            UserError: Naming the field.
        """
        spec = recipe.data.spec
        holds = get_task(task_name(spec)).holds
        remedy = f"is for classes of whole images, and data {spec} has {holds}; leave it out"
        for name in OF_CLASSES:
            value = getattr(recipe.loss, name)
            require(not value or name in self.losses, f"loss.{name}", value, remedy)
        pool = recipe.model.global_pool
        remedy = f"is for classifiers: a {self.dense} reads every token out; leave it out"
        require(not self.dense or pool is None, "model.global_pool", pool, remedy)

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
        """Make what a run trains: a `module`.

        Args:
            recipe: The run.
            model: Built by the recipe.
            data: Its images.
            steps: Batches of an epoch.
            losses: Keeps the training losses.
            teacher: Whose answers are learned too, where the recipe has that term.
        """
        del teacher
        return self.module(recipe, model, data=data, steps_per_epoch=steps, losses=losses)

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
        own: What else the task records, a dataclass; None for nothing.
    """

    scores: Mapping[str, float | None]
    answers: Answers
    own: object | None = None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Answers to the test split that no network was trained for, as a point of reference.

    Args:
        name: What answers, such as ``largest class``.
        about: How, in a clause.
        evaluated: The answers with their scores.
        learned: Whether anything was learned from the inputs; if not, a model that is no better
            has learned nothing.
        validated: The score that models are compared by, of its answers to the validation split;
            None where it is not known.
    """

    name: str
    about: str
    evaluated: Evaluated
    learned: bool
    validated: float | None = None


@dataclass(frozen=True, kw_only=True)
class DetailsTable:
    """What a task records next to its scores, as a table.

    Args:
        title: What it is of, such as ``each class``.
        heads: Of the columns, the first of names and the others of numbers.
        rows: Cells.
        note: What stands below; nothing if empty.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of a file; a task's own has more fields.

    Args:
        path: The file.
        error: Why there is no answer, or None.
    """

    path: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An input that a model has answered.

    Args:
        path: Its file; empty of an image in memory.
        size: Its own height and width, pixels, which the model may not have seen it at; of what
            was prepared before, and of recordings, those that the model saw.
        pixels: Its own pixels, uint8 ``[C, h, w]``; None of what was prepared before, and of
            recordings.
    """

    path: str
    size: tuple[int, int]
    pixels: Pixels | None = None


@dataclass(frozen=True, kw_only=True)
class PredictionRows:
    """Predictions as a table or as CSV.

    Args:
        heads: Of the columns.
        rows: Cells, one row or several per file.
        left: Columns of words, which stand to the left of the numbers.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]
    left: int = 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What ``keymix predict`` is asked to write into a folder.

    Args:
        run: The run's folder.
        paths: Files and folders; none for a split of data.
        out: The folder to write.
        data: A data spec of which a split is predicted; None for the run's own.
        split: Of the data; None for the test split.
        which: Weights of the ``last`` or the ``best`` epoch.
        image_size: Side, or height and width, pixels, of the images that the model sees; None for
            those of the training.
        resize: What mixers with parameters per position do at another size.
        overlap: Share by which windows of the size overlap that slide over images at their own.
        flips: Mirror images that are answered too.
        score_threshold: Score from which on what is found is drawn and counted; None for the
            task's own.
        overwrite: Replace predictions that the folder holds.
    """

    run: Path
    paths: Sequence[str | Path]
    out: Path
    data: str | None = None
    split: Literal["train", "val", "test"] | None = None
    which: Literal["last", "best"] = "last"
    image_size: int | tuple[int, int] | None = None
    resize: str | None = None
    overlap: float | None = None
    flips: Flips | None = None
    score_threshold: float | None = None
    overwrite: bool = False


class AnswersPart(ABC):
    """How a task's models are evaluated, what is kept of that, and how two are compared.

    ``prediction`` is what is said of a file, and ``predict_options`` are the options that
    ``keymix predict`` takes besides those of all tasks: ``top``, ``time_steps``, ``data``,
    ``split``, ``per_image``, ``score_threshold``, and, where each pixel is answered, ``window``,
    ``overlap``, ``flips``. Predictions are printed; a task that writes them into a folder names
    keymix's public function that does so as ``writer``. ``at_once`` is how many inputs a model is
    given together to predict. ``chance`` is what `skill` compares with, in a clause.
    """

    prediction: type[Prediction] = Prediction
    predict_options: frozenset[str] = frozenset({"time_steps"})
    writer: str = ""
    at_once: int = 64
    chance: str = ""

    @torch.inference_mode()
    def evaluate(
        self,
        model: nn.Module,
        batches: Iterable[ImageBatch],
        split: Split,
        data: ImageData,
        *,
        device: torch.device,
        precision: str = "32",
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
        answering = self.answering(model, data.record(), data.image_size)
        outputs = answered(answering, batches, device=device, precision=precision)
        found = self.evaluated(outputs, split, data, device)
        if ranks.size() > 1 and len(found.answers.index) != len(split):
            raise UserError(
                f"task {data.task.name!r} scores one device's share of {split.name}: its "
                "`evaluated` must take the answers through `joined`."
            )
        return found

    def answering(self, model: nn.Module, seen: DataRecord, size: tuple[int, int]) -> nn.Module:
        """Return what answers inputs as evaluation serves them; the model, unless the task says so.

        Args:
            model: Takes inputs of the size.
            seen: The data.
            size: Height and width, pixels.
        """
        del seen, size
        return model

    def joined(self, answers: Answers, data: ImageData) -> Any:
        """Return the answers to a whole split, of which each rank has those to its share.

        Args:
            answers: This rank's; of a training on one device they are returned as they are.
            data: The data set.
        """
        if ranks.size() == 1:
            return answers
        parts = ranks.gathered({**answers.shared(), **answers.arrays("last")})
        stored = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return self.read(stored, "last", data.record())

    @abstractmethod
    def evaluated(
        self, outputs: Outputs, split: Split, data: ImageData, device: torch.device
    ) -> Evaluated:
        """Score what a model gives for a split, which it does batch by batch in inference mode.

        Args:
            outputs: Pairs of a batch and what the model returned for it; of all inputs, once.
            split: The split.
            data: The data set.
            device: Where both are.
        """

    @abstractmethod
    def read(self, stored: Arrays, which: Literal["last", "best"], data: DataRecord) -> Answers:
        """Read answers that `Answers.shared` and `Answers.arrays` stored.

        Args:
            stored: Arrays by name.
            which: Weights of the ``last`` or the ``best`` epoch.
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

    def details(self, test: SplitScores) -> Sequence[DetailsTable]:
        """Return what an evaluation records next to its scores; nothing to say no more."""
        del test
        return ()

    def predictions(
        self, outputs: Any, paths: Sequence[str], seen: DataRecord, *, top: int
    ) -> Iterable[Prediction]:
        """Say what a model gave for some files, one prediction each.

        Args:
            outputs: Of the model, for a batch.
            paths: The files.
            seen: The record of the data that the run was trained on.
            top: Most answers per file, for tasks that rank answers.
        """
        del outputs, paths, seen, top
        raise UserError("this task predicts no files; score it with `keymix eval`.")

    def predicted(
        self, outputs: Any, inputs: Sequence[Answered], seen: DataRecord, *, top: int
    ) -> Iterable[Prediction]:
        """Say what a model gave for some inputs, one prediction each.

        `predictions`, unless an answer depends on an input's own size.

        Args:
            outputs: Of the model, for a batch.
            inputs: The inputs.
            seen: The record of the data that the run was trained on.
            top: Most answers per input, for tasks that rank answers.
        """
        return self.predictions(outputs, [each.path for each in inputs], seen, top=top)

    def table(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Arrange predictions for a person to read; see `csv`.

        Args:
            found: Those without an error.
            noun: What a file is, such as ``image``.
        """
        plain = self.csv(found)
        rows = [[_cell(value) for value in row] for row in plain.rows]
        return PredictionRows(heads=[noun, *plain.heads[1:]], rows=rows)

    def summary(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Sum up predictions that were written into a folder; their `table` if nothing is shorter.

        Args:
            found: Those without an error.
            noun: What a file is, such as ``image``.
        """
        return self.table(found, noun)

    def csv(self, found: Sequence[Prediction]) -> PredictionRows:
        """Arrange predictions for a program to read: the file, and each field.

        Args:
            found: Those without an error.
        """
        common = {item.name for item in fields(Prediction)}
        names = [item.name for item in fields(self.prediction) if item.name not in common]
        rows = [[each.path, *(_plain(getattr(each, name)) for name in names)] for each in found]
        return PredictionRows(heads=["image", *names], rows=rows)

    def plain(self, found: Prediction) -> object:
        """Return a prediction as JSON holds it."""
        values = to_json(found)
        return {key: value for key, value in values.items() if key != "error" or value is not None}

    def write(self, wanted: Wanted) -> tuple[Sequence[Prediction], str]:
        """Write predictions into a folder, where ``writer`` names a function for it.

        Args:
            wanted: What to predict.

        Returns:
            What was predicted, and a line that says what was written.
        """
        raise UserError(f"predictions of {str(wanted.run)!r} are printed, not written to a folder.")

    def options_for(self, seen: DataRecord, spec: str) -> Mapping[str, Setting]:
        """Options of the task with which other data is read as that of a run was.

        Args:
            seen: The record of the data that the run was trained on.
            spec: The other data.
        """
        del seen, spec
        return {}

    def check_data(self, data: ImageData, seen: DataRecord) -> None:
        """Refuse data that a run on other data cannot be scored on, such as with other classes.

        Args:
            data: The data.
            seen: The record of the data that the run was trained on.

        Raises:
            UserError: Naming what differs.
        """
        new = [name for name in data.classes if name not in seen.classes]
        if new:
            raise UserError(
                f"data {data.spec!r} has classes that the run was not trained on: "
                f"{', '.join(new[:5])}{' …' if len(new) > 5 else ''}. It knows "
                f"{', '.join(seen.classes[:10])}."
            )

    def references(self, data: ImageData) -> Iterable[Reference]:
        """Answer the test split without a trained network, as points of reference.

        Such as the class that is most frequent in training, for every image.

        Args:
            data: The data set.
        """
        del data
        return ()

    def skill(
        self, answers: Answers, references: Mapping[str, Answers], score: Score
    ) -> tuple[float, FloatArray] | None:
        """Measure what a model has learned: above 0 if it has, with a value for each unit.

        The difference from the best of the references that learned nothing.

        Args:
            answers: Of the model, on the test split.
            references: Answers that nothing had to be learned for, by name.
            score: The score that models are compared by.

        Returns:
            The difference, of which more is better, and its `Answers.unit_values`; None where
            there is nothing to compare with.
        """
        known = list(references.values())
        if not known:
            return None
        best = max(known, key=lambda each: score.rank(whole(each)))
        difference = whole(answers) - whole(best)
        values = answers.unit_values() - best.unit_values()
        return (difference, values) if score.better == "more" else (-difference, -values)


def _plain(value: object) -> str | int | float | None:
    """A value as CSV takes it; what is no number or text is written as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(to_json(value))


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def training_of(task: Task) -> TrainingPart:
    """Open a task's training."""
    return cast(TrainingPart, task.load("training"))


def answers_of(task: Task) -> AnswersPart:
    """Open a task's answers."""
    return cast(AnswersPart, task.load("answers"))
