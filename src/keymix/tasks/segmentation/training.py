# SPDX-License-Identifier: Apache-2.0
"""How segmentation is trained: cross entropy of pixels, and a soft Dice loss beside it if asked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from keymix.tasks.segmentation.facts import TASK, MaskOptions
from keymix.tasks.segmentation.losses import loss_of_each, mean_loss, soft_dice_loss
from keymix.tasks.segmentation.scoring import MaskScores
from keymix.train.config import require
from keymix.train.losses import Teacher
from keymix.train.nonfinite import Losses
from keymix.train.parts import TrainingPart
from keymix.train.recipe import Recipe
from keymix.train.scoring import Inputs
from keymix.train.task import StepLoss, TrainingTask

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


class SegmentationTask(TrainingTask):
    """Masks of images under a recipe.

    Args:
        recipe: The run.
        model: A segmenter whose parameters train: images to one logit a class and pixel.
        data: The data set, for its classes.
        steps_per_epoch: Batches a training epoch.
        losses: Keeps the training losses: the cross entropy, and beside it ``dice_loss``.
    """

    kind = TASK

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        *,
        data: ImageData,
        steps_per_epoch: int,
        losses: Losses,
    ) -> None:
        scores = MaskScores(data)
        super().__init__(
            recipe, model, scores=scores, steps_per_epoch=steps_per_epoch, losses=losses
        )
        self._multilabel, self._scored = scores.multilabel, scores.scored

    @property
    def _dice(self) -> float:
        """Weight of the Dice loss."""
        return self.recipe.task.read(MaskOptions).dice

    def step_loss(self, images: Inputs, targets: Any) -> StepLoss:
        """Return the cross entropy, with the Dice loss where it has a weight."""
        terms: dict[str, Tensor] = {}
        logits = self.answered(images, targets, terms)
        loss = mean_loss(logits, targets, multilabel=self._multilabel)
        each = partial(loss_of_each, logits.detach(), targets, multilabel=self._multilabel)
        return StepLoss(recorded=loss, trained=self.whole(loss, terms), terms=terms, each=each)

    def answered(self, images: Inputs, targets: Tensor, terms: dict[str, Tensor]) -> Tensor:
        """Segment images, and note the Dice loss where it has a weight."""
        logits: Tensor = self.trained(images).float()
        if self._dice:
            terms["dice_loss"] = soft_dice_loss(
                logits, targets, multilabel=self._multilabel, classes=self._scored
            )
        return logits

    def whole(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """The cross entropy and the Dice loss, by their weights."""
        weight = self._dice
        return (1 - weight) * loss + weight * terms["dice_loss"] if weight else loss


class Segmentation(TrainingPart):
    """The training of segmentation."""

    def check(self, recipe: Recipe) -> None:
        """Refuse losses of classes, and the readout of classifiers."""
        super().check(recipe)
        pool = recipe.model.global_pool
        remedy = "is for classifiers: a segmenter reads every token out; leave it out"
        require(pool is None, "model.global_pool", pool, remedy)

    def make(
        self,
        recipe: Recipe,
        model: nn.Module,
        data: ImageData,
        *,
        steps: int,
        losses: Losses,
        teacher: Teacher | None,
    ) -> SegmentationTask:
        """Make what a run trains."""
        del teacher
        return SegmentationTask(recipe, model, data=data, steps_per_epoch=steps, losses=losses)


TRAINING = Segmentation()
