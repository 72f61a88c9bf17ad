# SPDX-License-Identifier: Apache-2.0
"""The records of a run, as its files keep them. Reading this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from keymix.data.record import DataRecord, SameImages
from keymix.errors import UserError
from keymix.records import Own, spread
from keymix.task import LOSS, Task
from keymix.train.recipe import Recipe

FORMAT = 3
"""Of a run's folder: its summary, weights and checkpoints."""

Scores = Mapping[str, float | None]
"""Scores by name, None where one is not defined."""


@dataclass(frozen=True, kw_only=True)
class SplitScores:
    """What weights score on a split.

    Args:
        scores: By the keys of the task's scores, and ``loss``.
        own: What else the task records: its `details`.
    """

    scores: Scores = field(metadata=spread())
    own: Own = field(default_factory=Own, metadata=spread())

    def of(self, task: Task) -> SplitScores:
        """Separate a task's scores from its details, which a file mixes."""
        values = {**self.scores, **self.own.values}
        return replace(
            self,
            scores={key: value for key, value in self.scores.items() if key in task.keys},
            own=Own({key: value for key, value in values.items() if key not in task.keys}),
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation(SplitScores):
    """What `keymix.evaluate` found.

    Args:
        images: Number of images.
        data: Spec of the data.
        split: Which split.
        weights: Weights of the ``last`` or the ``best`` epoch.
        image_size: Height and width of the images, pixels.
        resize: Policy of mixers that have parameters per position.
        time_steps: T, or None of a model without.
        overlap: Share by which sliding windows of that size overlap; None of images seen whole.
        flips: Mirror images that were answered too.
    """

    images: int
    data: str
    split: str
    weights: str
    image_size: tuple[int, int]
    resize: str | None
    time_steps: int | None
    overlap: float | None = None
    flips: str | None = None


@dataclass(frozen=True, kw_only=True)
class Validated:
    """An epoch and the validation scores of its weights.

    Args:
        epoch: From 0.
        val: Scores by name.
    """

    epoch: int
    val: Scores

    def rank(self, task: Task) -> tuple[float, float]:
        """What epochs are ranked by: the task's score, then the loss if any; more is better."""
        score, loss = self.val.get(task.score.key), self.val.get(LOSS)
        if score is None:
            raise ValueError(f"epoch {self.epoch} has no {task.score.key}")
        by_score, by_loss = task.score.rank(score), 0.0 if loss is None else -loss
        return by_score, by_loss


@dataclass(frozen=True, kw_only=True)
class EpochLine:
    """A line of ``metrics.jsonl``.

    Args:
        epoch: From 0.
        train: The training loss, and its terms without their weights.
        val: The validation scores.
        lr: Learning rate of the last step.
        seconds: Duration with validation.
        images_per_s: Training images per second.

    Raises:
        UserError: If the training loss, or every validation score, is missing.
    """

    epoch: int
    train: Scores = field(metadata=spread("train_"))
    val: Scores = field(metadata=spread("val_"))
    lr: float | None = None
    seconds: float | None = None
    images_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise UserError(f"epoch = {self.epoch} is no epoch")
        if self.train.get(LOSS) is None:
            raise UserError("it lacks train_loss")
        if all(value is None for value in self.val.values()):
            raise UserError("it lacks the scores of the validation")

    @property
    def validated(self) -> Validated:
        """Its epoch and validation scores."""
        return Validated(epoch=self.epoch, val=self.val)


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """What a file of weights says of itself.

    Args:
        recipe: The run.
        data: Its data.
        epoch: The weights' epoch; None of a swapped model.
        val: Their validation scores; None of a swapped model.
        format: `FORMAT`.
    """

    format: int = FORMAT
    recipe: Recipe
    data: DataRecord
    epoch: int | None = None
    val: Scores | None = None

    def omitted(self) -> tuple[str, ...]:
        """The fields that are not written."""
        return ("epoch", "val") if self.epoch is None and self.val is None else ()

    def of(self, validated: Validated) -> WeightsFacts:
        """The facts of the weights of an epoch."""
        return replace(self, epoch=validated.epoch, val=validated.val)


@dataclass(frozen=True, kw_only=True)
class SameData(SameImages):
    """What of the data must not change within a run, as checkpoints keep it.

    Args:
        classes: Names of the classes.
    """

    classes: tuple[str, ...]

    @classmethod
    def of(cls, data: DataRecord) -> SameData:
        """Take it from the data's record."""
        return cls(
            fingerprint=data.fingerprint, index_sha256=data.index_sha256, classes=data.classes
        )


@dataclass(frozen=True, kw_only=True)
class EpochsDone:
    """What checkpoints keep of the epochs before them.

    Args:
        seconds: Of the epoch that is not finished.
        data: Whose images were seen.
        lines: The epochs' lines.
    """

    seconds: float
    data: SameData
    lines: tuple[EpochLine, ...]


@dataclass(frozen=True, kw_only=True)
class Tested(Validated):
    """An epoch, and what its weights score in validation and test.

    Args:
        test: Of the test split.
    """

    test: SplitScores


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What came out of a run: its ``summary.json``. `keymix.records.to_json` gives plain data.

    Args:
        status: ``done``.
        model: Name of the model.
        mixer: Label of its mixers; None for the model's own.
        seed: Seed of the training.
        params: Trainable parameters.
        epochs: Number of epochs.
        seconds: Duration of the training.
        last: The last epoch.
        best: The epoch that validated best.
        data: The data.
        task: Name of the task.
        format: `FORMAT`.

    Raises:
        UserError: If a score of the task is missing, or the task is not the data's.
    """

    format: int = FORMAT
    status: Literal["done"]
    model: str
    mixer: str | None
    seed: int
    params: int
    epochs: int
    seconds: float
    last: Tested
    best: Tested
    data: DataRecord
    task: str

    def __post_init__(self) -> None:
        if self.task != self.data.task:
            raise UserError(f"task {self.task!r} is not that of the data, {self.data.task!r}")
        for which, tested in (("last", self.last), ("best", self.best)):
            if tested.epoch < 0:
                raise UserError(f"{which}.epoch={tested.epoch} is no epoch")
            _check_scores(self.task_kind, f"{which}.val", tested.val)
            _check_scores(self.task_kind, f"{which}.test", tested.test.scores)
            test = tested.test.of(self.task_kind)
            if self.task_kind.details is not None:
                test.own.read(self.task_kind.details, where=f"{which}.test")
            object.__setattr__(self, which, replace(tested, test=test))

    @property
    def task_kind(self) -> Task:
        """The task, with its scores."""
        return self.data.task_kind


def _check_scores(task: Task, place: str, scores: Scores) -> None:
    for name in task.keys:
        needed = name in (LOSS, task.score.key)
        if name not in scores or (needed and scores[name] is None):
            raise UserError(f"{place} has no {name}")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a part of a run was computed with. All is None where it is unknown.

    Args:
        python: Version of Python.
        keymix: Version of keymix.
        commit: Commit of the checkout, with ``+`` if it was modified; None outside one.
        packages: Versions by package.
        platform: The operating system.
        cpu: Name of the processor.
        cores: Logical processors.
        threads: Threads of torch.
        device: Name of the GPU, or ``cpu``.
        cuda: Version of CUDA; None without a GPU.
        ranks: Devices that shared each batch; None for one.
        strategy: How: ``ddp`` or ``fsdp``; None for one device.
    """

    python: str | None = None
    keymix: str | None = None
    commit: str | None = None
    packages: Mapping[str, str] | None = None
    platform: str | None = None
    cpu: str | None = None
    cores: int | None = None
    threads: int | None = None
    device: str | None = None
    cuda: str | None = None
    ranks: int | None = None
    strategy: str | None = None

    def omitted(self) -> tuple[str, ...]:
        """The fields that are not written: all of an unknown machine, and one device."""
        if not self.known:
            return tuple(vars(Machine()))
        return () if self.ranks else ("ranks", "strategy")

    @property
    def known(self) -> bool:
        """Whether anything is known."""
        return any(getattr(self, name) is not None for name in vars(Machine()))


@dataclass(frozen=True, kw_only=True)
class Environment(Machine):
    """What a run was computed with: its ``environment.json``.

    Args:
        earlier: With what a resumed run was trained before, where that was something else.
    """

    earlier: tuple[Machine, ...] = ()

    @property
    def machine(self) -> Machine:
        """What the last part of the run was computed with."""
        return Machine(**{name: getattr(self, name) for name in vars(Machine())})

    def omitted(self) -> tuple[str, ...]:
        """The fields that are not written."""
        return (*super().omitted(), *(() if self.earlier else ("earlier",)))
