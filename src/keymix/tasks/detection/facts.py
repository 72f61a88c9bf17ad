# SPDX-License-Identifier: Apache-2.0
"""What detection is: a box for each instance in an image, and a mask where data have outlines."""

from __future__ import annotations

from dataclasses import dataclass

from keymix.task import Score, Task


@dataclass(frozen=True, kw_only=True)
class ClassPrecision:
    """How well a class is found; None where no test image has an instance of it, or no mask.

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
    ("ap", "AP"),
    ("ap50", "AP50"),
    ("ap75", "AP75"),
    ("ap_small", "AP small"),
    ("ap_medium", "AP medium"),
    ("ap_large", "AP large"),
)


def _score(shape: str, key: str, name: str) -> Score:
    """One of COCO's average precisions, of boxes or masks."""
    name = f"{shape} {name}"
    needs = "outlines" if shape == "mask" else ""
    return Score(key=f"{shape}_{key}", name=name, short=name, label=name, needs=needs)


TASK = Task(
    name="detection",
    does="detects instances",
    holds="images with instances",
    scores=tuple(
        _score(shape, *part)
        for some in (_PARTS[:1], _PARTS[1:])  # AP of both first, then what it consists of
        for shape in ("box", "mask")
        for part in some
    ),
    validation_loss=False,
    unit="image",
    whole_images=True,
    fits=True,
    details=DetectionDetails,
    pipeline="object-detection",
    training="keymix.tasks.detection.training:TRAINING",
    answers="keymix.tasks.detection.answers:ANSWERS",
    page="keymix.tasks.detection.page:PAGE",
    recipes={"": "mask_rcnn_small"},
)
