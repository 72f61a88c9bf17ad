# SPDX-License-Identifier: Apache-2.0
"""What detection is: a box and a mask for each instance in an image. No heavy import."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from keymix.task import Score, Task


@dataclass(frozen=True, kw_only=True)
class ClassPrecision:
    """How well a class is found; None where no test image has an instance of it.

    Args:
        name: Of the class.
        box_ap: AP of its boxes.
        mask_ap: AP of its masks.
        instances: True instances without crowds.
        images: Images that have one.
    """

    name: str
    box_ap: float | None
    mask_ap: float | None
    instances: int
    images: int


@dataclass(frozen=True, kw_only=True)
class DetectionDetails:
    """What an evaluation records of instances next to its scores.

    Args:
        detections: Detections that were scored.
        instances: True instances without crowds.
        crowds: Crowd regions, which are ignored.
        empty: Images without an instance.
        of_sizes: True instances that are small, medium and large.
        classes: The classes.
    """

    detections: int
    instances: int
    crowds: int
    empty: int
    of_sizes: tuple[int, int, int]
    classes: tuple[ClassPrecision, ...]


_PARTS = (
    ("ap", "AP", "over IoU thresholds 0.50 to 0.95"),
    ("ap50", "AP50", "at IoU 0.50"),
    ("ap75", "AP75", "at IoU 0.75"),
    ("ap_small", "AP small", "of instances below 32² pixels"),
    ("ap_medium", "AP medium", "of instances from 32² to 96² pixels"),
    ("ap_large", "AP large", "of instances above 96² pixels"),
)


def _score(shape: str, part: tuple[str, str, str]) -> Score:
    """One of COCO's average precisions, of boxes or masks."""
    key, name, _ = part
    return Score(
        key=f"{shape}_{key}",
        name=f"{shape} {name}",
        short=f"{shape} {name}",
        label=f"{shape} {name}",
    )


_LED = (_PARTS[:1], _PARTS[1:])
"""AP of boxes and of masks come first, then what each consists of."""

TASK = Task(
    name="detection",
    does="detects instances",
    holds="images with instances",
    scores=tuple(
        _score(shape, part) for some in _LED for shape, part in product(("box", "mask"), some)
    ),
    validation_loss=False,
    unit="image",
    whole_images=True,
    fits=True,
    details=DetectionDetails,
    training="keymix.tasks.detection.training:TRAINING",
    answers="keymix.tasks.detection.answers:ANSWERS",
    page="keymix.tasks.detection.page:PAGE",
    recipes={"": "mask_rcnn_small"},
)
