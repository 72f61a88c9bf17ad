# SPDX-License-Identifier: Apache-2.0
"""What segmentation is: a mask for each image. Reading this costs no heavy import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from keymix.errors import UserError
from keymix.task import Score, Task


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """The options of segmentation, ``task.options`` in recipes.

    A training step's loss is (1 - dice) times the loss of pixels, plus dice times that of overlap,
    plus boundary times that of distance; `keymix.tasks.segmentation.losses` defines the three.

    Args:
        dice: Weight, 0 to 1, of the loss of overlap: soft Dice over all classes but the background.
        tversky: Weights of pixels that are found too much and of those that are missed in the loss
            of overlap; 0.5,0.5 is Dice, 0.3,0.7 finds more.
        focal: The focal loss's exponent, 1 or more; 0 for cross entropy.
        boundary: Weight of the boundary loss, which is a mean distance in pixels, such as 0.01.
        class_weights: ``balanced`` weighs each class in the loss of pixels so that all have the
            same sum over the training masks; or a weight by name, 1 of the classes left out.
        intensity_window: Values of scans that become black and white, such as -160,240 Hounsfield
            units; None scales each slice from its least and largest value.
        window_overlap: Share, 0 to below 1, by which neighbouring windows overlap. Images then keep
            their own size: training sees random crops of ``data.image_size``, a third of them
            around a class drawn at random, and evaluation windows of that size, whose logits are
            averaged with Gaussian weights. None resizes images to ``data.image_size``.
        masks: ``exclusive`` for one class per pixel, ``multilabel`` for any number; None for what
            the folders of ``masks:PATH`` show, else ``exclusive``.
    """

    dice: float = 0.0
    tversky: tuple[float, float] = (0.5, 0.5)
    focal: float = 0.0
    boundary: float = 0.0
    class_weights: str | dict[str, float] | None = None
    intensity_window: tuple[float, float] | None = None
    window_overlap: float | None = None
    masks: Literal["exclusive", "multilabel"] | None = None

    def __post_init__(self) -> None:
        weights = self.class_weights
        given = weights.values() if isinstance(weights, dict) else ()
        fit = all(isinstance(each, int | float) and 0 <= each < math.inf for each in given)
        low, high = self.intensity_window or (0, 1)
        for name, good, remedy in (
            ("intensity_window", low < high, "give a lower and a higher value"),
            ("dice", 0 <= self.dice <= 1, "must lie in [0, 1]"),
            ("tversky", min(self.tversky) >= 0, "both weights must be 0 or more"),
            ("tversky", self.dice or self.tversky == (0.5, 0.5), "does nothing without dice"),
            ("focal", self.focal == 0 or self.focal >= 1, "must be 0, or 1 or more"),
            ("boundary", self.boundary >= 0, "must be 0 or more"),
            ("window_overlap", 0 <= (self.window_overlap or 0) < 1, "must lie in [0, 1)"),
            (
                "class_weights",
                fit and (isinstance(weights, dict | None) or weights == "balanced"),
                "name 'balanced', or weights of 0 or more by class, such as {leaf: 2}",
            ),
        ):
            if not good:
                value = getattr(self, name)
                raise UserError(f"task.options.{name} = {value!r}: {remedy}.")


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """The scores of one class of masks, None where neither truth nor prediction has a pixel of it.

    `hd95` and `surface_dice` are means over images, and `missed` counts the images where only one
    of them has pixels.
    """

    name: str
    jaccard: float | None
    dice: float | None
    hd95: float | None
    surface_dice: float | None
    missed: int


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """The scores of a case, such as a patient or a volume, of all pixels of its images together.

    `dice` is of each class, None where the case has no pixel of it in truth and prediction.
    """

    name: str
    images: int
    jaccard: float
    dice: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class MaskDetails:
    """What an evaluation records of masks next to its scores, of the classes that count.

    Distances are in mm where all images have a spacing, else in px of the images as the model sees
    them. `missed` are pairs of image and class that have pixels in truth or prediction alone: there
    is no distance, and the surface Dice is 0. `cases` begin with the worst.
    """

    hd95_mm: float | None = None
    hd95_px: float | None = None
    surface_dice: float | None
    missed: int
    distance_unit: Literal["mm", "px"]
    calibration_error: float | None
    true_pixels: int
    classes: tuple[ClassScores, ...]
    cases: tuple[CaseScores, ...]


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
    data_options=("masks", "intensity_window", "window_overlap"),
    details=MaskDetails,
    pipeline="image-segmentation",
    training="keymix.tasks.segmentation.training:TRAINING",
    answers="keymix.tasks.segmentation.answers:ANSWERS",
    page="keymix.tasks.segmentation.page:PAGE",
    plain="plain_unet",
    recipes={"": "small_masks_unet"},
)
