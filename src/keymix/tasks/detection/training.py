# SPDX-License-Identifier: Apache-2.0
"""How detection is trained: the model computes its losses itself, from images and instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis import passes
from keymix.data.record import DataRecord
from keymix.tasks.detection.facts import TASK
from keymix.train.parts import TrainingPart
from keymix.train.scoring import Inputs
from keymix.train.task import StepLoss, TrainingTask

SIDE = 3  # made-up instances of an example lie in as many rows and columns
MADE_LABEL = 1


class DetectionTask(TrainingTask):
    """The sum of the losses that the model returns; each is recorded by its name.

    Crowds are left out, since no single instance can be learned from one. What lies on them counts
    as background, as it does for torchvision's models.
    """

    kind = TASK

    def step_loss(self, images: Inputs, targets: Any) -> StepLoss:
        """Return the losses; images without instances have those of the background."""
        return StepLoss.of_parts(self.trained(images, [*map(without_crowds, targets)]))


def without_crowds(target: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what trains of an image's instances: boxes, labels and masks of those that are one."""
    names = [name for name in ("boxes", "labels", "masks") if name in target]
    if "iscrowd" not in target:
        return {name: target[name] for name in names}
    single = ~target["iscrowd"].bool()
    return {name: target[name][single] for name in names}


class Detection(TrainingPart):
    """The training of detection."""

    module = DetectionTask
    dense = "detector"

    def arguments(self, data: DataRecord) -> Mapping[str, bool]:
        """Leave the mask head out where the data have boxes alone."""
        return {"masks": False} if data.outlines is False else {}

    def example(self, shape: tuple[int, ...], batch_size: int) -> Inputs:
        """Make images of one size, as a list."""
        return list(passes.normal_inputs(shape, batch_size))

    def training_pass(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Run a training step's forward pass with made-up instances, and sum up the losses."""
        losses: dict[str, Tensor] = model(inputs, [made_up(each) for each in inputs])
        return torch.stack([*losses.values()]).sum()


def made_up(image: Tensor) -> dict[str, Tensor]:
    """Make instances that cover the middle of each cell of a grid on an image."""
    height, width = image.shape[-2:]
    middles = [(row, column) for row in range(SIDE) for column in range(SIDE)]
    corners = [_cell(row, column, height, width) for row, column in middles]
    masks = torch.zeros(len(corners), height, width, dtype=torch.uint8, device=image.device)
    for mask, (left, top, right, bottom) in zip(masks, corners, strict=True):
        mask[int(top) : int(bottom), int(left) : int(right)] = 1
    return {
        "boxes": torch.tensor(corners, dtype=torch.float32, device=image.device),
        "labels": torch.full((len(corners),), MADE_LABEL, device=image.device),
        "masks": masks,
    }


def _cell(row: int, column: int, height: int, width: int) -> Sequence[float]:
    """Return left, top, right and bottom of the middle half of a cell, pixels."""
    down, across = height / SIDE, width / SIDE
    top, left = (row + 0.25) * down, (column + 0.25) * across
    return left, top, left + across / 2, top + down / 2


TRAINING = Detection()
