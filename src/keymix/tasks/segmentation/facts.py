# SPDX-License-Identifier: Apache-2.0
"""What segmentation is: a mask for each image. Reading this costs no heavy import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keymix.errors import UserError
from keymix.task import Score, Task


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """The options of segmentation, ``task.options`` in recipes.

    Args:
        dice: Weight w, 0 to 1, of the soft Dice loss: the loss is (1 - w) times the cross entropy
            of pixels plus w times the mean over classes but the background of
            1 - (2 sum(p y) + 1) / (sum(p) + sum(y) + 1), sums over the batch.
        masks: ``exclusive`` for one class per pixel, ``multilabel`` for any number; None for what
            the folders of ``masks:PATH`` show, else ``exclusive``.
    """

    dice: float = 0.0
    masks: Literal["exclusive", "multilabel"] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dice <= 1:
            raise UserError(f"task.options.dice = {self.dice!r}: must lie in [0, 1].")


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """The scores of one class of masks, None where neither truth nor prediction has a pixel of it.

    `missed` counts the images where only one of them has.
    """

    name: str
    jaccard: float | None
    dice: float | None
    hausdorff_mm: float | None
    missed: int


@dataclass(frozen=True, kw_only=True)
class MaskDetails:
    """What an evaluation records of masks next to its scores, of the classes that count.

    `hausdorff_missed` are pairs of image and class without a distance.
    """

    hausdorff_mm: float | None = None
    hausdorff_missed: int
    hausdorff_unit: Literal["mm", "px"]
    true_pixels: int
    classes: tuple[ClassScores, ...]


TASK = Task(
    name="segmentation",
    does="predicts masks",
    holds="images with masks",
    scores=(
        Score(key="jaccard", name="mean IoU", short="mIoU", label="mean IoU"),
        Score(
            key="weighted_jaccard",
            name="weighted IoU",
            short="weighted",
            label="weighted IoU",
        ),
        Score(key="dice", name="Dice coefficient", short="Dice", label="Dice"),
    ),
    unit="case",
    options=MaskOptions,
    data_options=("masks",),
    details=MaskDetails,
    pipeline="image-segmentation",
    training="keymix.tasks.segmentation.training:TRAINING",
    answers="keymix.tasks.segmentation.answers:ANSWERS",
    page="keymix.tasks.segmentation.page:PAGE",
    plain="plain_unet",
    recipes={"": "small_masks_setr"},
)
