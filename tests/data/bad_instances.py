# SPDX-License-Identifier: Apache-2.0
"""Bad data with instances as they are met; `bad_inputs` has the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_row import Row
from coco_sets import write

OF_INSTANCES = "mask_rcnn_small"
CORRECT, CORRECT_IMAGE = (
    f"Correct it, or leave such {items} out with --data.skip_corrupt true; `keymix data check` "
    "names them all."
    for items in ("annotations", "images")
)
FILE = "shots/annotations/instances_train2017.json"
PLACE = f"{FILE}: annotation 200 of '0002.png'"


def shots(change: Callable[[dict[str, Any]], object] = lambda found: None) -> Path:
    """Eleven images in ``shots``; something of the training images is changed."""
    return write(Path("shots"), change=change)


def annotation(**values: Any) -> Callable[[], Path]:
    """Change the first annotation of the second image, of 40x60 pixels."""
    return lambda: shots(lambda found: found["annotations"][2].update(values))


def without_image() -> None:
    (shots() / "train2017" / "0002.png").unlink()


INSTANCE_ROWS: tuple[Row, ...] = (
    Row(
        "a category that is not declared",
        "coco:shots",
        f"{PLACE} has the category 4, which is none. {CORRECT}",
        annotation(category_id=4),
        recipe=OF_INSTANCES,
    ),
    Row(
        "a box outside the image",
        "coco:shots",
        f"{PLACE} has the bbox [30.0, 6.0, 12.5, 20.0] in 40x60 pixels. {CORRECT}",
        annotation(bbox=[30, 6, 12.5, 20]),
        recipe=OF_INSTANCES,
    ),
    Row(
        "an image that is missing",
        "coco:shots",
        "cannot read image shots/train2017/0002.png: No such file or directory. " + CORRECT_IMAGE,
        without_image,
        recipe=OF_INSTANCES,
    ),
    Row(
        "an image of another size than stated",
        "coco:shots",
        "shots/train2017/0003.png has 48x48 pixels, and its entry states 49x48. " + CORRECT_IMAGE,
        lambda: shots(lambda found: found["images"][2].update(width=49)),
        recipe=OF_INSTANCES,
    ),
    Row(
        "no annotations of training images",
        "coco:shots",
        "data coco:shots: shots has no annotations to learn from. Arrange the data as "
        "annotations/instances_train2017.json with the images in train2017/, and likewise for val; "
        "or as train.json with train/; or as train/_annotations.coco.json next to its images.",
        lambda: Path("shots").mkdir(),
        recipe=OF_INSTANCES,
    ),
)
