# SPDX-License-Identifier: Apache-2.0
"""A SETR of width 96 and 4 blocks on small images with masks, for minutes on two cores.

For a first look at masks of one's own, and what `keymix compare` takes on them where no recipe is
named: enough to see a mechanism learn, far from what it can reach.

    keymix train small_masks_setr --data masks:PATH --out small
    keymix train small_masks_setr --data uwgi:PATH --out organs
    keymix compare --data uwgi:PATH --mixers 'mhsa,kv,kv(pos_dim=50)' --out organs-cmp

Paper: none; schedule and augmentations are those of the KV paper (``setr_qkv_uwgi``), the learning
rate is a small net's, and half of the loss is Dice, so that small organs count.
Measured: docs/results/uw-madison-36.md, on 36 slices with 100 epochs.
"""

from __future__ import annotations

from keymix.data.augment import Augment
from keymix.train.recipe import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    TaskConfig,
)


def recipe() -> Recipe:
    """The run, complete but for the data's path."""
    return Recipe(
        name="small_masks_setr",
        data=DataConfig(
            spec="masks:",
            image_size=96,
            val_fraction=1 / 6,
            batch_size=4,
            eval_batch_size=64,
        ),
        augment=Augment(
            flip=True,
            vertical_flip=True,
            shift_scale_rotate=True,
            coarse_dropout=True,
            brightness_contrast=True,
        ),
        model=ModelConfig(name="setr_micro"),
        optim=OptimConfig(name="adamw", lr=3e-3, weight_decay=0.01, clip_grad=1.0),
        schedule=ScheduleConfig(name="poly", power=0.9, epochs=60),
        task=TaskConfig(options={"dice": 0.5}),
    )
