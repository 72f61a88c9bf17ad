# SPDX-License-Identifier: Apache-2.0
"""How segmentation is trained: cross entropy of pixels, and a soft Dice loss if asked."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from keymix.tasks.segmentation.facts import TASK, MaskOptions
from keymix.tasks.segmentation.scoring import (
    MaskScores,
    loss_of_each,
    mean_loss,
    soft_dice_loss,
)
from keymix.train.nonfinite import Losses
from keymix.train.parts import TrainingPart
from keymix.train.recipe import Recipe
from keymix.train.scoring import Inputs
from keymix.train.task import StepLoss, TrainingTask

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


class SegmentationTask(TrainingTask):
    """Cross entropy of pixels, with the soft Dice loss by the weight ``task.options.dice``."""

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

    def step_loss(self, images: Inputs, targets: Any) -> StepLoss:
        """Return the cross entropy, with the Dice loss where it has a weight."""
        logits: Tensor = self.trained(images).float()
        loss = mean_loss(logits, targets, multilabel=self._multilabel)
        each = partial(loss_of_each, logits.detach(), targets, multilabel=self._multilabel)
        weight = self.recipe.task.read(MaskOptions).dice
        if not weight:
            return StepLoss(recorded=loss, trained=loss, each=each)
        dice = soft_dice_loss(logits, targets, multilabel=self._multilabel, classes=self._scored)
        trained = (1 - weight) * loss + weight * dice
        return StepLoss(recorded=loss, trained=trained, terms={"dice_loss": dice}, each=each)


class Segmentation(TrainingPart):
    """The training of segmentation."""

    module = SegmentationTask
    dense = "segmenter"


TRAINING = Segmentation()
