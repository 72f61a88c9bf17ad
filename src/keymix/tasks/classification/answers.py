# SPDX-License-Identifier: Apache-2.0
"""What classifiers answered, right or wrong, class by class, and how that is scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from keymix.analysis import statistics
from keymix.analysis.answers import (
    Answers,
    Arrays,
    FloatArray,
    IntArray,
    whole,
)
from keymix.data.findings import UNEVEN
from keymix.data.record import DataRecord
from keymix.task import LOSS, Score, Task
from keymix.tasks.classification.references import largest_class, logistic_regression
from keymix.train.parts import AnswersPart, Evaluated, Prediction, PredictionRows, Reference
from keymix.train.scoring import Metrics, Outputs, ValidationScores

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split

BoolArray = npt.NDArray[np.bool_]
Shares = npt.NDArray[np.float16]

TOP5_FROM = 6
"""Classes; with five or fewer, top-5 is always right and recorded as null."""
FEW = 8
"""Images below which the same answer for all means little."""
NEARLY = 0.95
"""Share of images with one answer that counts as all, unless its class is as many images."""
LINEAR = "logistic regression"
"""The name of that reference."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassAnswers(Answers):
    """The class that a model gave each image of a split, all arrays ``[N]``.

    `top5` says whether the true class is among the five most likely, `confidence` is the
    probability of the predicted class. The score is balanced accuracy if `balanced`.
    """

    index: IntArray
    target: IntArray
    predicted: IntArray
    top5: BoolArray
    confidence: Shares
    classes: tuple[str, ...]
    balanced: bool = False
    imaginary: ClassVar[float] = 2.0

    @property
    def units(self) -> int:
        """Number of images."""
        return len(self.index)

    @property
    def correct(self) -> BoolArray:
        """Whether each image was right, ``[N]``."""
        right: BoolArray = self.predicted == self.target
        return right

    def score(self, weights: FloatArray) -> FloatArray:
        """Weighted share of right answers, ``[R, N]`` -> ``[R]``; NaN without any weight.

        Balanced, it is the mean of the shares of the classes that have weight.
        """
        right, member = self.correct.astype(np.float64), np.ones((self.units, 1))
        if self.balanced:
            member = (self.target[:, None] == np.unique(self.target)).astype(np.float64)
        total = weights @ member
        share: FloatArray = np.full(total.shape, np.nan)
        np.divide(weights @ (right[:, None] * member), total, out=share, where=total > 0)
        there = (total > 0).sum(axis=1)
        mean: FloatArray = np.full(len(weights), np.nan)
        np.divide(np.nansum(share, axis=1), there, out=mean, where=there > 0)
        return mean

    def unit_values(self) -> FloatArray:
        r"""Whether each image was right, 1 or 0; balanced, its share in the score, ``[N]``.

        With :math:`K` classes of :math:`n_k` images and recalls :math:`r_k`, image :math:`i` of
        class :math:`k` has :math:`B + \frac{N}{K n_k} \sqrt{\frac{n_k}{n_k - 1}} (x_i - r_k)`:
        the mean is balanced accuracy :math:`B`, and the variance of the mean that of an interval
        stratified by class.
        """
        right = self.correct.astype(np.float64)
        if not self.balanced:
            return right
        return balanced_values(right, self.target)

    def balanced_as(self, balanced: bool) -> ClassAnswers:  # which of two scores
        """Return the same answers scored by balanced accuracy, or by accuracy."""
        return replace(self, balanced=balanced)

    def shared(self) -> Arrays:
        """Positions and true classes."""
        return {"index": self.index, "target": self.target}

    def arrays(self, which: str) -> Arrays:
        """Predicted classes, whether the true one is among five, and probabilities."""
        return {
            f"{which}_pred": self.predicted,
            f"{which}_top5": self.top5,
            f"{which}_confidence": self.confidence,
        }

    def same_truth(self, other: Answers) -> bool:
        """Whether other answers are to the same images with the same classes."""
        return (
            isinstance(other, ClassAnswers)
            and np.array_equal(self.index, other.index)
            and np.array_equal(self.target, other.target)
        )

    def degenerate(self) -> tuple[str, ...]:
        """Say that (nearly) all images of several classes got one answer.

        A class with ten times the images of all others together may be the answer to nearly all.
        """
        total, targets = len(self.predicted), self.target.tolist()
        if total < FEW or len(set(targets)) == 1:
            return ()
        answer, count = Counter(self.predicted.tolist()).most_common(1)[0]
        own = targets.count(answer)
        nearly = count >= NEARLY * total and own < UNEVEN * (total - own)
        if count < total and not nearly:
            return ()
        who = "every one of" if count == total else f"{count:,} of"
        name = self.classes[answer]
        return (f"{who} the {total:,} {{inputs}} got the same answer, {name!r}",)

    def per_class(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Count the images of each class, and those of them that were right."""
        right = self.target[self.correct]
        return counts(self.target, len(self.classes)), counts(right, len(self.classes))


def balanced_values(right: FloatArray, target: IntArray) -> FloatArray:
    """Return each image's share in balanced accuracy; see `ClassAnswers.unit_values`."""
    classes, place, images = np.unique(target, return_inverse=True, return_counts=True)
    recall = np.bincount(place, weights=right) / images
    spread = np.sqrt(images / np.maximum(images - 1, 1))
    weight = (len(target) / (len(classes) * images) * spread)[place]
    values: FloatArray = recall.mean() + weight * (right - recall[place])
    return values


def scores_of(answers: ClassAnswers) -> Metrics:
    """Return the scores of answers that no loss was computed of."""
    return {
        LOSS: None,
        "top1": whole(answers.balanced_as(False)),
        "balanced": whole(answers.balanced_as(True)),
        "top5": float(answers.top5.mean()) if len(answers.classes) >= TOP5_FROM else None,
    }


def is_balanced(task: Task) -> bool:
    """Whether models are compared by balanced accuracy."""
    return task.score.key == "balanced"


def counts(labels: IntArray, num_classes: int) -> tuple[int, ...]:
    """Count the images of each class."""
    return tuple(np.bincount(labels, minlength=num_classes).tolist())


class Scores(ValidationScores):
    """Mean loss, accuracy, balanced and top-5 accuracy of an evaluation.

    Accuracies are quotients of whole numbers: 21 of 200 is 0.105 and not its float32.
    """

    loss: Tensor
    counts: Tensor  # by class: images, those that were right, those right among five [3, classes]

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            loss=torch.zeros((), dtype=torch.float64),
            counts=torch.zeros((3, num_classes), dtype=torch.int64),
        )

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch: logits [B, classes], targets [B]."""
        logits, classes = logits.float(), self.counts.shape[1]
        five = (logits.topk(min(5, classes), dim=1).indices == targets[:, None]).any(1)
        hit = logits.argmax(1) == targets
        found = [torch.bincount(each, minlength=classes) for each in (targets, targets[hit])]
        self.counts += torch.stack([*found, torch.bincount(targets[five], minlength=classes)])
        self.loss += F.cross_entropy(logits, targets, reduction="sum")

    def metrics(self) -> Metrics:
        """The scores since the last call: ``loss``, and as fractions or None the task's."""
        sums = self.taken()
        images, right, top5 = sums["counts"].tolist()
        total = sum(images)
        return {
            "loss": float(sums["loss"]) / total,
            "top1": sum(right) / total,
            "balanced": float(np.mean([r / n for r, n in zip(right, images, strict=True) if n])),
            "top5": sum(top5) / total if len(images) >= TOP5_FROM else None,
        }


@dataclass(frozen=True, kw_only=True)
class ClassPrediction(Prediction):
    """The most likely classes of an image, best first, with their probabilities, 0..1."""

    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Classes with their probabilities, best first."""
        return list(zip(self.classes, self.probabilities, strict=True))


class ClassificationAnswers(AnswersPart):
    """How classifiers are evaluated."""

    prediction = ClassPrediction
    predict_options = frozenset({"top", "time_steps"})
    chance = "the balanced accuracy of one answer for all images"

    def evaluated(
        self, outputs: Outputs, split: Split, data: ImageData, device: torch.device
    ) -> Evaluated:
        """Score the class of every image."""
        del split
        classes = len(data.classes)
        scores = Scores(classes).to(device)
        parts: list[tuple[Tensor, ...]] = []
        for batch, output in outputs:
            logits, targets = output.float(), batch.targets
            scores.update(logits, targets)
            best = logits.topk(min(5, classes), dim=1).indices
            hit = (best == targets[:, None]).any(1)
            sure = logits.softmax(1).half().amax(1)
            found = (batch.index, targets, best[:, 0], hit, sure)
            parts.append(tuple(each.cpu() for each in found))
        index, target, predicted, top5, confidence = (
            torch.cat(part).numpy() for part in zip(*parts, strict=True)
        )
        answers = ClassAnswers(
            index=index,
            target=target,
            predicted=predicted,
            top5=top5,
            classes=data.classes,
            confidence=confidence,
            balanced=is_balanced(data.task),
        )
        return Evaluated(scores=scores.metrics(), answers=self.joined(answers, data))

    def read(
        self, stored: Arrays, which: Literal["last", "best"], data: DataRecord
    ) -> ClassAnswers:
        """Read answers, images in the order of their index."""
        order = np.argsort(stored["index"], kind="stable")
        return ClassAnswers(
            index=stored["index"][order],
            target=stored["target"][order],
            predicted=stored[f"{which}_pred"][order],
            top5=stored[f"{which}_top5"][order],
            confidence=stored[f"{which}_confidence"][order],
            classes=data.classes,
            balanced=is_balanced(data.task_kind),
        )

    def interval(
        self, task: Task, mixer: Mapping[int, Answers], baseline: Mapping[int, Answers]
    ) -> statistics.Interval | None:
        """Compare two mixers over the test images (`keymix.analysis.statistics.over_images`).

        Of balanced accuracy by the images' shares in it, hence stratified by class.
        """
        if task.score.key == "balanced":
            return statistics.over_units(mixer, baseline, score=task.score, unit=task.unit)
        ours, theirs = (
            {seed: ClassAnswers.of(answers).correct for seed, answers in runs.items()}
            for runs in (mixer, baseline)
        )
        return statistics.over_images(ours, theirs, unit=task.unit)

    def predictions(
        self, outputs: Any, paths: Sequence[str], seen: DataRecord, *, top: int
    ) -> Iterator[ClassPrediction]:
        """Name the most likely classes of each image."""
        logits: Tensor = outputs
        best = logits.float().softmax(1).topk(min(top, len(seen.classes)), dim=1)
        chosen = zip(paths, best.indices.tolist(), best.values.tolist(), strict=True)
        for path, numbers, shares in chosen:
            names = tuple(seen.classes[i] for i in numbers)
            yield ClassPrediction(path=path, classes=names, probabilities=tuple(shares))

    def table(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Make a row per image."""
        rows = [
            [each.path, ", ".join(f"{name} {share:.1%}" for name, share in _ranked(each))]
            for each in found
        ]
        return PredictionRows(heads=[noun, "classes"], rows=rows, left=2)

    def csv(self, found: Sequence[Prediction]) -> PredictionRows:
        """Make a row per image and class."""
        rows: list[list[str | int]] = [
            [each.path, rank, name, f"{share:.6f}"]
            for each in found
            for rank, (name, share) in enumerate(_ranked(each), start=1)
        ]
        return PredictionRows(heads=["image", "rank", "class", "probability"], rows=rows)

    def plain(self, found: Prediction) -> object:
        """Return the classes of an image, best first, or its error."""
        if found.error is not None:
            return {"image": found.path, "error": found.error}
        top = [{"class": name, "probability": share} for name, share in _ranked(found)]
        return {"image": found.path, "top": top}

    def references(self, data: ImageData) -> Iterator[Reference]:
        """The largest class, and logistic regression on few pixels."""
        yield Reference(
            name="largest class",
            about="the class with most training images, for every test image",
            evaluated=_of_shares(data, largest_class(data, data.test)),
            learned=False,
            validated=whole(_answers(data, data.val, largest_class(data, data.val))),
        )
        if len(np.unique(data.train.labels.numpy())) > 1:
            shares, score, about = logistic_regression(
                data, lambda shares: whole(_answers(data, data.val, shares))
            )
            found = _of_shares(data, shares)
            yield Reference(
                name=LINEAR, about=about, evaluated=found, learned=True, validated=score
            )

    def skill(
        self, answers: Answers, references: Mapping[str, Answers], score: Score
    ) -> tuple[float, FloatArray]:
        """How far balanced accuracy lies above 1/K, that of one answer for all images."""
        del references, score
        balanced = ClassAnswers.of(answers).balanced_as(True)
        chance = 1 / len(np.unique(balanced.target))
        return whole(balanced) - chance, balanced.unit_values() - chance


def _answers(data: ImageData, split: Split, shares: FloatArray) -> ClassAnswers:
    """Answer a split by the most likely class of each image, of probabilities ``[N, K]``."""
    target = split.labels.numpy()
    ranked = np.argsort(-shares, axis=1, kind="stable")
    return ClassAnswers(
        index=np.arange(len(target)),
        target=target,
        predicted=ranked[:, 0],
        top5=(ranked[:, :5] == target[:, None]).any(axis=1),
        classes=data.classes,
        confidence=shares.max(axis=1).astype(np.float16),
        balanced=is_balanced(data.task),
    )


def _of_shares(data: ImageData, shares: FloatArray) -> Evaluated:
    answers = _answers(data, data.test, shares)
    return Evaluated(scores=scores_of(answers), answers=answers)


def _ranked(found: Prediction) -> list[tuple[str, float]]:
    assert isinstance(found, ClassPrediction)
    return found.ranked


ANSWERS = ClassificationAnswers()
