# SPDX-License-Identifier: Apache-2.0
"""Recipes of runs that take a second or two: on recordings of events, on masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keymix.data.augment import Augment
from keymix.train.recipe import (
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    replace_path,
)

MOVING = Recipe(
    name="moving",
    data=DataConfig(
        spec="moving_digits:100", time_steps=2, frames_by="time", image_size=16, batch_size=16
    ),
    augment=Augment(flip=True, snn_wide=True),
    model=ModelConfig(name="qkformer_micro_32", options={"embed_dim": 32, "num_heads": 2}),
    optim=OptimConfig(lr=1e-3),
    schedule=ScheduleConfig(epochs=2),
    loss=LossConfig(mixup=0.5),
)
"""A run on recordings, with mixup and their own augmentation."""


def on_masks(scans: Path, **changes: Any) -> Recipe:
    """Return a run of a second: two blocks, 24 pixels, the five augmentations."""
    recipe = Recipe(
        name="masks",
        data=DataConfig(
            spec=f"uwgi:{scans}", image_size=24, batch_size=4, val_fraction=0.2, test_fraction=0.3
        ),
        augment=Augment(
            flip=True,
            vertical_flip=True,
            shift_scale_rotate=True,
            coarse_dropout=True,
            brightness_contrast=True,
        ),
        model=ModelConfig(
            name="setr_micro", options={"depth": 2, "embed_dim": 24, "decoder_widths": (16, 8, 8)}
        ),
        optim=OptimConfig(lr=3e-3),
        schedule=ScheduleConfig(name="poly", epochs=2),
    )
    return replace_path(recipe, {key.replace("__", "."): value for key, value in changes.items()})
