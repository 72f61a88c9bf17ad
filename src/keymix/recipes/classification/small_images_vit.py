# SPDX-License-Identifier: Apache-2.0
"""A ViT of width 128 and 4 blocks on small colour images such as CIFAR-10, a few epochs.

For an afternoon on two CPU cores: enough to see a mechanism learn, far from what it can reach.

    keymix train small_images_vit --data parquet:PATH --limit 10000 --out small

Paper: none; crop and flip are the usual for 32x32 images.
Measured: on 10,000 CIFAR-10 images with `keymix compare` (docs/results/cifar10-10k.md), test top-1
of the last epoch over seeds 0, 1, 2: softmax 39.4 ± 0.3 %, static_key 45.9 ± 0.6 %, which is early
training (the page says how early); about 30 s of processor time an epoch on one thread of a Xeon,
torch 2.15.
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
    """The run, complete but for the data's path."""
    return Recipe(
        name="small_images_vit",
        data=DataConfig(spec="parquet:", image_size=32, batch_size=128),
        augment=Augment(crop_padding=4, flip=True),
        model=ModelConfig(name="vit_micro_p4_32"),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, clip_grad=1.0),
        schedule=ScheduleConfig(name="cosine", epochs=6, warmup_epochs=1),
    )
