# SPDX-License-Identifier: Apache-2.0
"""What detection is: a box and a mask for each instance in an image. No heavy import."""

from __future__ import annotations

from itertools import product

from keymix.task import Score, Task

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
    training="keymix.tasks.detection.training:TRAINING",
    answers="keymix.tasks.detection.answers:ANSWERS",
    page="keymix.tasks.detection.page:PAGE",
    recipes={"": "mask_rcnn_small"},
)
