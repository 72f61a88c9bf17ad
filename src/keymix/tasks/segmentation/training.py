# SPDX-License-Identifier: Apache-2.0
"""How segmentation is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from keymix.train.parts import TrainingPart
from keymix.train.segmentation import SegmentationTask

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.distill import Teacher
    from keymix.train.nonfinite import Losses
    from keymix.train.recipe import Recipe


class Segmentation(TrainingPart):
    """The training of segmentation."""

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
        return SegmentationTask(
            recipe,
            model,
            data=data,
            steps_per_epoch=steps,
            losses=losses,
        )


TRAINING = Segmentation()
