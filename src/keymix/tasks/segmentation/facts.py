# SPDX-License-Identifier: Apache-2.0
"""What segmentation is: a mask for each image. Reading this costs no heavy import."""

from __future__ import annotations

from keymix.task import Score, Task

TASK = Task(
    name="segmentation",
    does="predicts masks",
    holds="images with masks",
    scores=(
        Score(key="jaccard", name="mean Jaccard index", short="Jaccard", label="Jaccard"),
        Score(
            key="weighted_jaccard",
            name="weighted Jaccard index",
            short="weighted",
            label="weighted Jaccard",
        ),
        Score(key="dice", name="Dice coefficient", short="Dice", label="Dice"),
    ),
    unit="case",
    training="keymix.tasks.segmentation.training:TRAINING",
    recipes={"": "small_masks_setr"},
)
