# SPDX-License-Identifier: Apache-2.0
"""ViT-S with shifted patches on CIFAR-10 under the static-key authors' settings.

Paper: Static Key Attention in Vision, Tables 1 and 9. Published top-1, the best epoch on the test
set of one run (seed 42): ViT-S 83.4 % (9.6 M parameters), SKA 84.1 % (8.1 M) and 84.7 % (widened to
9.5 M), CSKA 87.0 % (10.0 M).

    keymix train vit_small_cifar10 --out vit-s
    keymix train vit_small_cifar10 --mixer ska --out ska-vit-s
    keymix train vit_small_cifar10 --model ska_vit_small_spt_p4_32_wide --out ska-wide-vit-s
    keymix compare --recipe vit_small_cifar10 --mixers mhsa,ska,cska --seeds 5 --out vit-s-cmp

The authors' code (zizhao-hu/SKA): Adam 1e-4, no weight decay, cosine without warm-up, 200 epochs,
batch 512, mixed precision. RandAugment (2 operations, magnitude 9), then a crop of 32 with padding
4 and a flip; no mixup, smoothing, stochastic depth or averaging. Dropout 0.1 (their Table 9).
Differs: a tenth of the training images is held out to choose the best epoch on, and the last epoch
is told beside it; the schedule moves at every update, theirs once an epoch; mean and deviation are
measured on the training images. Their LayerNorms add 1e-5 to the variance, and they drop no entries
of attention maps: ``--model.options.norm_eps 1e-5 --model.options.attn_drop_rate 0``. With ``--data
parquet:PATH`` any copy of CIFAR-10 serves.

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
        name="vit_small_cifar10",
        data=DataConfig(spec="cifar10", image_size=32, batch_size=512),
        augment=Augment(rand_augment=(2, 9), rand_augment_first=True, crop_padding=4, flip=True),
        model=ModelConfig(
            name="vit_small_spt_p4_32",
            options={"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1},
        ),
        optim=OptimConfig(name="adam", lr=1e-4, weight_decay=0.0),
        schedule=ScheduleConfig(name="cosine", epochs=200),
        seed=42,
    )
