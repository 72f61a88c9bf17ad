# SPDX-License-Identifier: Apache-2.0
"""How classification is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from keymix.train.parts import TrainingPart
from keymix.train.task import ClassificationTask

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.distill import Teacher
    from keymix.train.nonfinite import Losses
    from keymix.train.recipe import Recipe


class Classification(TrainingPart):
    """The training of classification."""

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
        return ClassificationTask(
            recipe,
            model,
            num_classes=self.outputs(data.record()),
            steps_per_epoch=steps,
            losses=losses,
            teacher=teacher,
        )


TRAINING = Classification()
