# SPDX-License-Identifier: Apache-2.0
"""What a task is, and the look-up of tasks by name. Reading this costs no heavy import.

A task says what a model learns from images: the target that stands next to each, the loss, the
scores, and how they are written. It has four parts that load apart: its facts (`Task`), its
``training``, its ``answers`` and its ``page``. The built-in tasks are the folders of
`keymix.tasks`; `register_task` adds one's own. No other room names a task: it asks the one that
the data set.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from keymix.arguments import checked
from keymix.errors import UserError, unknown

DEFAULT = "classification"
"""The task of records that name none: those of the first versions, which knew no other."""
IMBALANCE = 1.3
"""Classes are uneven if the largest has more training inputs than this times their mean."""
LOSS = "loss"
"""Key of the loss among the scores of an evaluation."""
Part = Literal["training", "answers", "page"]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number that an evaluation gives.

    Args:
        key: Its key in records, such as ``top1``.
        name: In a sentence, such as ``accuracy``.
        short: At the head of a narrow column, such as ``top-1``.
        label: Over an axis, and after ``test`` at the head of a column, such as ``accuracy``.
        better: Whether ``more`` or ``less`` of it is better.
        low: The least that it can be; None if there is no bound.
        high: The most that it can be; None if there is no bound.
        unit: ``%`` of a fraction, which is written in percent and whose differences are points;
            else the unit itself, or nothing.
        places: Decimal places of a value that is no fraction; None for three digits.
        needs: The fact of the data, a field of `keymix.data.record.DataFacts`, without which it is
            not defined; empty for none.
    """

    key: str
    name: str
    short: str
    label: str
    better: Literal["more", "less"] = "more"
    low: float | None = 0.0
    high: float | None = 1.0
    unit: str = "%"
    places: int | None = None
    needs: str = ""

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown: 100 of a fraction."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def difference_unit(self) -> str:
        """The unit of a difference: ``points`` of fractions."""
        return "points" if self.unit == "%" else self.unit

    def ahead(self, difference: float) -> bool:
        """Whether a difference, one minus another, says that the one is better."""
        return difference > 0 if self.better == "more" else difference < 0

    def rank(self, value: float) -> float:
        """A number of which more is better."""
        return value if self.better == "more" else -value

    def digits(self, value: float, places: int = 1) -> str:
        """Write a value without its unit: a fraction in percent to `places`, else to `self.places`.

        Args:
            value: The value.
            places: Decimal places of a percentage.
        """
        if self.unit == "%":
            return f"{100 * value:.{places}f}"
        if self.places is not None:
            return f"{value:.{self.places}f}"
        return f"{value:.{places}f}" if 10 <= abs(value) < 1e6 else f"{value:.3g}"

    def text(self, value: float) -> str:
        """Write a value with its unit, such as ``93.1 %`` or ``2.41 mm``."""
        return f"{self.digits(value)}\u00a0{self.unit}" if self.unit else self.digits(value)

    def change(self, difference: float, *, sign: bool = True) -> str:
        """Write a difference without its unit, such as ``+1.2`` or ``−0.4``."""
        text = self.digits(abs(difference))
        if not sign or float(text) == 0:
            return text
        return ("−" if difference < 0 else "+") + text

    def changed(self, difference: float, *, sign: bool = True) -> str:
        """Write a difference with its unit, such as ``+1.2 points``."""
        return f"{self.change(difference, sign=sign)} {self.difference_unit}".rstrip()


FRACTION = Score(key="score", name="score", short="score", label="score")
"""A score of which nothing is known but that it is a fraction and that more is better."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The facts of a task.

    Args:
        name: Its name, in data specs and records.
        does: What a model of it does, such as ``classifies images``.
        holds: What its data are, such as ``images with a class each``.
        scores: The scores of an evaluation; models are compared by the first.
        uneven: Key of the score that models are compared by where classes are uneven
            (`IMBALANCE`); empty for the first.
        right_or_wrong: Whether each answer is right or wrong and the first score is the share that
            is right, so that what a test split can show is known before training.
        validation_loss: Whether evaluation gives a loss.
        unit: Unit of chance, of which intervals over the test split are, such as ``image``.
        options: A frozen dataclass of the task's own options, ``task.options`` in recipes.
        data_options: Those of them that loading the data takes.
        details: The dataclass of what an evaluation records next to its scores; None for nothing.
        models: The task that models say they are for, where another task's models serve it.
        plain: Model without a mixer that joins comparisons as a point of reference; empty for none.
        recipes: Default recipe of a comparison, by kind of input; under ``""`` that of any other.
        rooms: What else takes its models: ``swap``.
        pipeline: What the Hugging Face Hub calls it; empty if it has no name there.
        whole_images: Whether all of an image is seen, and a batch is a list of images of unequal
            sizes: their own, unless `data.image_size` is given.
        fits: With `whole_images`, whether images are always resized, and keep their proportions:
            `data.image_size` is a short and a long side, and an image's short side becomes the
            short one unless its long side would then be longer than the long one.
        training: How it is trained, a `keymix.train.parts.TrainingPart`: the object, or where it
            is, ``module:attribute``, so that it loads when it is needed.
        answers: How its models are evaluated, a `keymix.train.parts.AnswersPart`, likewise.
        page: What a report shows of it, a `keymix.report.part.Page`, likewise; None for the
            sections that all tasks share.
    """

    name: str
    does: str
    holds: str
    scores: tuple[Score, ...]
    uneven: str = ""
    right_or_wrong: bool = False
    validation_loss: bool = True
    unit: str = "image"
    options: type | None = None
    data_options: tuple[str, ...] = ()
    details: type[Any] | None = None
    models: str = ""
    plain: str = ""
    recipes: Mapping[str, str] = field(default_factory=dict)
    rooms: frozenset[str] = frozenset()
    pipeline: str = ""
    whole_images: bool = False
    fits: bool = False
    training: object = None
    answers: object = None
    page: object = None

    @property
    def score(self) -> Score:
        """The score that models are compared by."""
        return self.scores[0]

    def compared_by(self, key: str | None) -> Task:
        """Return the task with another of its scores as the one that models are compared by.

        Args:
            key: Of the score; None for the first.
        """
        if key is None or key == self.score.key:
            return self
        first = [each for each in self.scores if each.key == key]
        return replace(self, scores=(*first, *(s for s in self.scores if s.key != key)))

    def decided_by(self, class_inputs: Sequence[int]) -> str | None:
        """Say which score models are compared by, if it is not the first.

        Args:
            class_inputs: Training inputs of each class; empty where there are no classes.
        """
        uneven = max(class_inputs, default=0) * len(class_inputs) > IMBALANCE * sum(class_inputs)
        return self.uneven if self.uneven and uneven else None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the scores of an evaluation, the loss first where there is one."""
        own = tuple(score.key for score in self.scores)
        return (LOSS, *own) if self.validation_loss else own

    @property
    def takes(self) -> str:
        """The task that its models say they are for."""
        return self.models or self.name

    @property
    def own_sizes(self) -> bool:
        """Whether images may keep their own sizes."""
        return self.whole_images and not self.fits

    def has(self, part: Part) -> bool:
        """Whether it has a part."""
        return getattr(self, part) is not None

    def load(self, part: Part) -> Any:
        """Return a part; the room that asks says what it must be.

        Raises:
            UserError: If the task has no such part.
        """
        where = getattr(self, part)
        if where is None:
            raise UserError(f"task {self.name!r} has no part {part!r}; give it with register_task")
        if not isinstance(where, str):
            return where
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name)


_OWN: dict[str, Task] = {}


@cache
def built_in_tasks() -> tuple[str, ...]:
    """Return the names of keymix's own tasks, the folders of `keymix.tasks`."""
    package = importlib.import_module("keymix.tasks")
    return tuple(sorted(each.name for each in pkgutil.iter_modules(package.__path__)))


def list_tasks() -> list[str]:
    """Return the names of all tasks, built-in and registered."""
    return [*built_in_tasks(), *(name for name in _OWN if name not in built_in_tasks())]


def get_task(name: str) -> Task:
    """Return a task by name.

    Raises:
        UserError: If there is none; the nearest names are given.
    """
    if name in _OWN:
        return _OWN[name]
    if name in built_in_tasks():
        found: Task = importlib.import_module(f"keymix.tasks.{name}.facts").TASK
        return found
    raise unknown("task", name, list_tasks())


@checked
def register_task(task: Task) -> Task:
    """Add a task of one's own; the same name again replaces it.

    Args:
        task: Its facts, with its parts.

    Raises:
        UserError: If a built-in task has the name, it has no score, a part is missing, or images
            fit a size without being whole.
    """
    if task.name in built_in_tasks():
        raise UserError(f"task {task.name!r} is keymix's own: choose another name")
    if not task.scores:
        raise UserError(f"task {task.name!r} has no score: models are compared by the first")
    if task.fits and not task.whole_images:
        raise UserError(f"task {task.name!r} resizes images with fits: give whole_images=True too")
    for part in ("training", "answers"):
        if getattr(task, part) is None:
            raise UserError(f"task {task.name!r} lacks its part {part!r}: give {part}=")
    _OWN[task.name] = task
    return task
