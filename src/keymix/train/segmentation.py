# SPDX-License-Identifier: Apache-2.0
"""The training step of masks: cross entropy of pixels, and a soft Dice loss beside it if asked.

The paper on KV attention in SETR (Hwa et al. 2025, https://doi.org/10.1007/978-3-658-47422-5_71,
Sec. 2.3) names no loss; cross entropy is that of SETR (https://arxiv.org/abs/2012.15840).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from keymix.data.dataset import ImageData
from keymix.data.tasks import SEGMENTATION
from keymix.train.mask_scoring import MaskScores, mean_loss, pixel_losses, soft_dice_loss
from keymix.train.nonfinite import Losses
from keymix.train.recipe import Recipe
from keymix.train.task import TrainingTask


class SegmentationTask(TrainingTask):
    """Masks of images under a recipe.

    Args:
        recipe: The run.
        model: A segmenter whose parameters train: images to one logit a class and pixel.
        data: The data set, for its classes.
        steps_per_epoch: Batches a training epoch.
        losses: Keeps the training losses: the cross entropy, and beside it ``dice_loss``.
    """

    kind = SEGMENTATION

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        *,
        data: ImageData,
        steps_per_epoch: int,
        losses: Losses,
    ) -> None:
        super().__init__(
            recipe, model, scores=MaskScores(data), steps_per_epoch=steps_per_epoch, losses=losses
        )
        assert data.masks is not None
        self._multilabel = data.masks.multilabel
        self._scored = list(data.record().scored_classes)

    def answered(self, images: Tensor, targets: Tensor, terms: dict[str, Tensor]) -> Tensor:
        """Segment images, and tell the Dice loss where it has a weight."""
        logits = self.trained(images).float()
        if self.recipe.loss.dice:
            terms["dice_loss"] = soft_dice_loss(
                logits, targets, multilabel=self._multilabel, classes=self._scored
            )
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over the pixels that count."""
        return mean_loss(logits, targets, multilabel=self._multilabel)

    def loss_of_each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The same of each image."""
        losses, counted = pixel_losses(logits, targets, multilabel=self._multilabel)
        return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)

    def whole(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """The cross entropy and the Dice loss, by their weights."""
        weight = self.recipe.loss.dice
        return (1 - weight) * loss + weight * terms["dice_loss"] if weight else loss
