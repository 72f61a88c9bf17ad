# SPDX-License-Identifier: Apache-2.0
"""How segmentation is trained: a loss of pixels, with others next to it if asked."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from keymix.errors import unknown
from keymix.tasks.segmentation.facts import TASK, MaskOptions
from keymix.tasks.segmentation.losses import boundary_loss, loss_of_each, mean_loss, overlap_loss
from keymix.tasks.segmentation.scoring import MaskScores
from keymix.tasks.segmentation.windows import seen_whole
from keymix.train.nonfinite import Losses
from keymix.train.parts import TrainingPart
from keymix.train.recipe import Recipe
from keymix.train.scoring import ImageBatch, Inputs
from keymix.train.task import StepLoss, TrainingTask

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


class SegmentationTask(TrainingTask):
    """The loss of pixels, with those of overlap and distance by their weights."""

    kind = TASK
    class_weights: Tensor | None

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
        self._seen = data.record()
        seen_whole(model, self._seen, data.image_size)  # or refuse, before anything is written
        weights = weights_of_classes(recipe.task.read(MaskOptions), data)
        self.register_buffer("class_weights", weights, persistent=False)

    def validation_step(self, batch: ImageBatch) -> None:
        """Score a batch of the validation split, as the test is seen."""
        assert self.scores is not None
        model = seen_whole(self.evaluated, self._seen, self._seen.image_size)
        self.scores.update(model(batch.images), batch.targets)

    def step_loss(self, images: Inputs, targets: Any) -> StepLoss:
        """Return the cross entropy, and what is trained by the options."""
        logits: Tensor = self.trained(images).float()
        options = self.recipe.task.read(MaskOptions)
        over = partial(mean_loss, logits, targets, multilabel=self._multilabel)
        each = partial(loss_of_each, logits.detach(), targets, multilabel=self._multilabel)
        loss = trained = over()
        if options.focal or self.class_weights is not None:
            trained = over(focal=options.focal, weights=self.class_weights)
        terms, of = {}, (logits, targets)
        kind: dict[str, Any] = {"multilabel": self._multilabel, "classes": self._scored}
        if options.dice:
            terms["dice_loss"] = overlap_loss(*of, **kind, tversky=options.tversky)
            trained = (1 - options.dice) * trained + options.dice * terms["dice_loss"]
        if options.boundary:
            terms["boundary_loss"] = boundary_loss(*of, **kind)
            trained = trained + options.boundary * terms["boundary_loss"]
        return StepLoss(recorded=loss, trained=trained, terms=terms, each=each)


def weights_of_classes(options: MaskOptions, data: ImageData) -> Tensor | None:
    """Return the weight of each class in the loss of pixels, ``[K]``; None if all weigh 1.

    ``balanced``: one over the number of classes and the share of the training pixels that a class
    has; of multilabel masks, the pixels outside of it for one inside. 0 of a class without pixels.
    A class that the data do not have is refused.
    """
    given, shares = options.class_weights, data.facts.class_shares
    if given is None:
        return None
    if isinstance(given, dict):
        for name in given:
            if name not in data.classes:
                raise unknown("task.options.class_weights", name, data.classes)
        return torch.tensor([float(given.get(name, 1.0)) for name in data.classes])
    share = torch.tensor(shares)
    assert data.masks is not None
    weights = (1 - share) / share if data.masks.multilabel else 1 / (share * len(data.classes))
    return torch.where(share > 0, weights, 0.0)


class Segmentation(TrainingPart):
    """The training of segmentation."""

    module = SegmentationTask
    dense = "segmenter"


TRAINING = Segmentation()
