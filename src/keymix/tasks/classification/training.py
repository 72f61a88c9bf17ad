# SPDX-License-Identifier: Apache-2.0
"""How classification is trained: cross entropy, what softens its targets, and added terms."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from keymix.data.mixing import Mixing
from keymix.errors import KeymixWarning
from keymix.tasks.classification.answers import Scores
from keymix.tasks.classification.facts import TASK
from keymix.train.losses import MapSimilarity, Teacher
from keymix.train.nonfinite import Losses
from keymix.train.parts import OF_CLASSES, TrainingPart
from keymix.train.recipe import Recipe
from keymix.train.scoring import ImageBatch, Inputs, stacked
from keymix.train.task import StepLoss, TrainingTask

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


class ClassificationTask(TrainingTask):
    """Cross entropy on images, mixed where asked, and the terms that the recipe adds to it."""

    kind = TASK

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        *,
        num_classes: int,
        steps_per_epoch: int,
        losses: Losses,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__(
            recipe,
            model,
            scores=Scores(num_classes),
            steps_per_epoch=steps_per_epoch,
            losses=losses,
        )
        self._teacher = teacher
        mixup, cutmix = recipe.loss.mixup, recipe.loss.cutmix
        chance = recipe.loss.mixup_prob
        self._mix = (
            Mixing(mixup, cutmix, num_classes, recipe.seed, chance) if mixup or cutmix else None
        )
        self._similarity = (
            MapSimilarity(model, recipe.loss.similarity_blocks) if recipe.loss.similarity else None
        )

    def served(self, batch: ImageBatch) -> tuple[Inputs, Any]:
        """Mix images where asked."""
        off = self.recipe.loss.mixup_off_epoch
        if self._mix is None or (off is not None and self.current_epoch >= off):
            return batch.images, batch.targets
        images = stacked(batch.images)
        return self._mix(images, batch.targets, batch.index, self.current_epoch)

    def step_loss(self, images: Inputs, targets: Any) -> StepLoss:
        """Return the cross entropy, and the terms that the recipe adds to it."""
        terms: dict[str, Tensor] = {}
        logits = self.answered(images, targets, terms)
        loss = self.loss(logits, targets)
        smoothing = self.recipe.loss.label_smoothing
        each = partial(loss_of_each, logits.detach(), targets, smoothing)
        return StepLoss(recorded=loss, trained=self.whole(loss, terms), terms=terms, each=each)

    def answered(self, images: Inputs, targets: Tensor, terms: dict[str, Tensor]) -> Tensor:
        """Classify, and compare maps and answers where the loss asks for it."""
        if self._similarity is None:
            logits: Tensor = self.trained(images).float()
        else:
            with self._similarity.listening() as calls:
                logits = self.trained(images).float()
            terms["similarity"] = self._similarity.mean(calls)
        if self._teacher is not None:
            terms["distill"] = self._teacher.term(stacked(images), logits)
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        smoothing = self.recipe.loss.label_smoothing
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def whole(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """The cross entropy plus the weighted terms."""
        config = self.recipe.loss
        if "distill" in terms:
            loss = (1 - config.distill) * loss + config.distill * terms["distill"]
        if self._similarity is not None:
            loss = loss + config.similarity * self._similarity.pairs * terms["similarity"]
        return loss

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: whose answers were learned, too."""
        teacher = {} if self._teacher is None else {"teacher": self._teacher.digest}
        return super().state() | teacher

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the epoch's line from a checkpoint, and warn of another teacher."""
        super().restore(state)
        if self._teacher is not None and state["teacher"] != self._teacher.digest:
            text = f"the teacher {self.recipe.loss.distill_teacher!r} has other weights than the "
            warnings.warn(f"{text}one that this run began with", KeymixWarning, stacklevel=1)


def loss_of_each(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Cross entropy of each image, ``[B]``."""
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")


class Classification(TrainingPart):
    """The training of classification."""

    module = ClassificationTask
    losses = frozenset(OF_CLASSES)

    def make(
        self,
        recipe: Recipe,
        model: nn.Module,
        data: ImageData,
        *,
        steps: int,
        losses: Losses,
        teacher: Teacher | None,
    ) -> ClassificationTask:
        """Make what a run trains."""
        task = ClassificationTask(
            recipe,
            model,
            num_classes=self.outputs(data.record()),
            steps_per_epoch=steps,
            losses=losses,
            teacher=teacher,
        )
        task.kind = data.task
        return task


TRAINING = Classification()
