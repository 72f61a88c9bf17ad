# SPDX-License-Identifier: Apache-2.0
"""What classification is: a class for each image. Reading this costs no heavy import."""

from __future__ import annotations

from keymix.task import Score, Task

TASK = Task(
    name="classification",
    does="classifies images",
    holds="images with a class each",
    scores=(
        Score(key="top1", name="accuracy", short="top-1", label="accuracy"),
        Score(
            key="balanced",
            name="balanced accuracy",
            short="balanced",
            label="balanced accuracy",
        ),
        Score(key="top5", name="top-5 accuracy", short="top-5", label="top-5"),
    ),
    uneven="balanced",
    right_or_wrong=True,
    training="keymix.tasks.classification.training:TRAINING",
    answers="keymix.tasks.classification.answers:ANSWERS",
    page="keymix.tasks.classification.page:PAGE",
    plain="plain_convnet",
    recipes={
        "": "small_images_vit",
        "digits": "digits_vit",
        "recording": "moving_digits_qkformer",
    },
    rooms=frozenset({"swap"}),
    pipeline="image-classification",
)
