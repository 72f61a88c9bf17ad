# SPDX-License-Identifier: Apache-2.0
"""What classifiers answered, right or wrong, class by class, and how that is scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from keymix.analysis import statistics
from keymix.analysis.answers import (
    Answers,
    Arrays,
    FloatArray,
    IntArray,
    WholeNumbers,
    array_faults,
)
from keymix.data.findings import Balance
from keymix.data.record import DataRecord
from keymix.task import LOSS, Task
from keymix.train.parts import AnswersPart, Evaluated, Prediction, PredictionRows
from keymix.train.scoring import ImageBatch, Metrics, ValidationScores, answered

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split

BoolArray = npt.NDArray[np.bool_]

TOP5_FROM = 6
"""Classes; with five or fewer, top-5 is always right and recorded as null."""
FEW = 8
"""Images below which the same answer for all means little."""
NEARLY = 0.95
"""Share of images with one answer that counts as all, unless its class dominates (`Balance`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassAnswers(Answers):
    """The class that a model gave each image of a split, all arrays ``[N]``.

    `top5` says whether the true class is among the five most likely; None if unknown.
    """

    index: IntArray
    target: IntArray
    predicted: IntArray
    top5: BoolArray | None
    classes: tuple[str, ...]

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
        """Weighted share of right answers, ``[R, N]`` -> ``[R]``; NaN without any weight."""
        total = weights.sum(axis=1)
        share: FloatArray = np.full(len(weights), np.nan)
        np.divide(weights @ self.correct.astype(np.float64), total, out=share, where=total > 0)
        return share

    def shared(self) -> Arrays:
        """Positions and true classes."""
        return {"index": self.index, "target": self.target}

    def arrays(self, which: str) -> Arrays:
        """Predicted classes, and whether the true one is among five."""
        predicted: dict[str, npt.NDArray[np.int64] | BoolArray] = {f"{which}_pred": self.predicted}
        return predicted if self.top5 is None else predicted | {f"{which}_top5": self.top5}

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
        nearly = count >= NEARLY * total and not Balance(Counter(targets)).dominates(answer)
        if count < total and not nearly:
            return ()
        who = "every one of" if count == total else f"{count:,} of"
        name = self.classes[answer]
        return (f"{who} the {total:,} {{inputs}} got the same answer, {name!r}",)

    def per_class(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Count the images of each class, and those of them that were right."""
        right = self.target[self.correct]
        return counts(self.target, len(self.classes)), counts(right, len(self.classes))


def counts(labels: IntArray, num_classes: int) -> tuple[int, ...]:
    """Count the images of each class."""
    return tuple(np.bincount(labels, minlength=num_classes).tolist())


class Hits(Metric):
    """Counts images and those whose class is among the k most likely, as whole numbers."""

    right: Tensor
    images: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        for name in ("right", "images"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch: logits [B, classes], targets [B]."""
        best = logits.argmax(1, keepdim=True) if self.k == 1 else logits.topk(self.k, dim=1).indices
        self.right += (best == targets[:, None]).sum()
        self.images += len(targets)

    def compute(self) -> Tensor:
        """How many were right, of how many images [2]."""
        return torch.stack([self.right, self.images])


class Scores(ValidationScores):
    """Mean loss and top-1 and top-5 accuracy over an evaluation, correct under distribution.

    Accuracies are quotients of whole numbers: 21 of 200 is 0.105 and not its float32.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanMetric()
        self.top1 = Hits(1)
        self.top5 = Hits(5) if num_classes >= TOP5_FROM else None

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch: logits [B, classes], targets [B]."""
        logits = logits.float()
        self.loss.update(F.cross_entropy(logits, targets), len(targets))
        self.top1.update(logits, targets)
        if self.top5 is not None:
            self.top5.update(logits, targets)

    def metrics(self) -> Metrics:
        """The scores since the last call: ``loss``, ``top1``, ``top5`` as fractions or None."""
        scores: Metrics = {
            "loss": float(self.loss.compute()),
            "top1": _share(self.top1),
            "top5": None if self.top5 is None else _share(self.top5),
        }
        for metric in (self.loss, self.top1, self.top5):
            if metric is not None:
                metric.reset()
        return scores


def _share(hits: Hits) -> float:
    right, images = hits.compute().tolist()
    return float(right / images)


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
        """Classify every image of a split."""
        del split
        classes = len(data.classes)
        scores = Scores(classes).to(device)
        parts: list[tuple[Tensor, ...]] = []
        for batch, outputs in answered(model, batches, device=device, precision=precision):
            logits, targets = outputs.float(), batch.targets
            scores.update(logits, targets)
            best = logits.topk(min(5, classes), dim=1).indices
            hit = (best == targets[:, None]).any(1)
            parts.append((batch.index.cpu(), targets.cpu(), best[:, 0].cpu(), hit.cpu()))
        index, target, predicted, top5 = (
            torch.cat(part).numpy() for part in zip(*parts, strict=True)
        )
        answers = ClassAnswers(
            index=index, target=target, predicted=predicted, top5=top5, classes=data.classes
        )
        return Evaluated(scores=scores.metrics(), answers=answers)

    def read(
        self, stored: Arrays, which: Literal["last", "best"], data: DataRecord
    ) -> ClassAnswers:
        """Read answers, images in the order of their index."""
        order = np.argsort(stored["index"], kind="stable")
        top5 = stored.get(f"{which}_top5")
        return ClassAnswers(
            index=stored["index"][order],
            target=stored["target"][order],
            predicted=stored[f"{which}_pred"][order],
            top5=None if top5 is None else top5[order],
            classes=data.classes,
        )

    def faults(self, stored: Arrays, data: DataRecord) -> Iterator[str]:
        """Say what is wrong with stored classes."""
        of_class = WholeNumbers(below=len(data.classes))
        names = ("target", "last_pred", "best_pred")
        return array_faults(stored, dict.fromkeys(names, of_class), data.sizes["test"])

    def interval(
        self, task: Task, mixer: Mapping[int, Answers], baseline: Mapping[int, Answers]
    ) -> statistics.Interval | None:
        """Compare two mixers over the test images (`keymix.analysis.statistics.over_images`)."""
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
            [each.path, ", ".join(f"{name} {share:.1%}" for name, share in each.ranked)]
            for each in _classified(found)
        ]
        return PredictionRows(heads=[noun, "classes"], rows=rows, left=2)

    def csv(self, found: Sequence[Prediction]) -> PredictionRows:
        """Make a row per image and class."""
        rows: list[list[str | int]] = [
            [each.path, rank, name, f"{share:.6f}"]
            for each in _classified(found)
            for rank, (name, share) in enumerate(each.ranked, start=1)
        ]
        return PredictionRows(heads=["image", "rank", "class", "probability"], rows=rows)

    def plain(self, found: Prediction) -> object:
        """Return the classes of an image, best first, or its error."""
        if found.error is not None:
            return {"image": found.path, "error": found.error}
        (own,) = _classified([found])
        top = [{"class": name, "probability": share} for name, share in own.ranked]
        return {"image": own.path, "top": top}

    def references(self, data: ImageData) -> Mapping[str, Evaluated]:
        """The class that is most frequent in training, for every test image."""
        classes = len(data.classes)
        often = np.bincount(data.train.labels.numpy(), minlength=classes)
        ranked = np.argsort(-often, kind="stable")[:5]
        target = data.test.labels.numpy()
        answers = ClassAnswers(
            index=np.arange(len(target)),
            target=target,
            predicted=np.full_like(target, ranked[0]),
            top5=np.isin(target, ranked),
            classes=data.classes,
        )
        top5 = None if classes < TOP5_FROM else float(np.isin(target, ranked).mean())
        scores = {LOSS: None, "top1": float(answers.correct.mean()), "top5": top5}
        return {"the most frequent class": Evaluated(scores=scores, answers=answers)}


def _classified(found: Sequence[Prediction]) -> list[ClassPrediction]:
    return [each for each in found if isinstance(each, ClassPrediction)]


ANSWERS = ClassificationAnswers()
