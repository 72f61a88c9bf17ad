# SPDX-License-Identifier: Apache-2.0
"""A small ViT on handwritten digits, each at its own place on a 12x12 canvas: the default.

No download, seconds on one CPU thread. A digit lies anywhere on the canvas, so its tokens must
talk to each other: a model without token mixing falls behind.

    keymix train digits_vit --out digits

Paper: none. Data: scikit-learn's bundled digits, 1,797 images.
Measured: not measured yet.
"""

from __future__ import annotations

from keymix.data.augment import Augment
from keymix.train.recipe import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
)


def recipe() -> Recipe:
    """The run, complete."""
    return Recipe(
        name="digits_vit",
        data=DataConfig(spec="digits", batch_size=64),
        augment=Augment(crop_padding=2),
        model=ModelConfig(name="vit_nano_p4_12"),
        optim=OptimConfig(name="adamw", lr=3e-3, weight_decay=0.05, clip_grad=1.0),
        schedule=ScheduleConfig(name="cosine", epochs=60, warmup_epochs=6),
    )
