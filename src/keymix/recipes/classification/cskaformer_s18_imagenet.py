# SPDX-License-Identifier: Apache-2.0
"""CSKAFormer-S18 on ImageNet-1k: CAFormer with convolutional static keys in its second stage.

Paper: Static Key Attention in Vision, Table 2. Published top-1 at 224 pixels: CSKAFormer-S18 83.4 %
(printed 28M, 8.2G), CAFormer-S18 83.3 % (26M, 8.2G; 83.6 % in its own paper). Counted here:
28,973,778 parameters, 12.8 GFLOPs; docs/papers.md says why the printed FLOPs are lower.

    keymix train cskaformer_s18_imagenet --data imagenet:PATH --out cskaformer-s18
    keymix train cskaformer_s18_imagenet --data imagenet:PATH --model caformer_s18 --out caformer

The settings are CAFormer's (sail-sg/metaformer), which the authors' own script keeps: LAMB 8e-3,
weight decay 0.05, batch 4096, cosine over 300 epochs to 1e-5 and 10 epochs of cool-down, warm-up of
20 epochs from 1e-6; RandAugment m9-mstd0.5-inc1, crops of 8 to 100 % of the area, flip, erasing
0.25 by noise; mixup 0.8, cutmix 1.0, smoothing 0.1; drop path 0.15, no dropout before the
classifier, no averaging, no clipping. Their colour jitter is given and unused: timm leaves it out
beside RandAugment.
Differs: 256 images a step and 16 steps an update make 4096 on one device; a tenth of the training
images is held out to choose the best epoch on; pixels of RandAugment's borders are grey, theirs the
data's mean; crops are resampled bicubically, theirs by chance also bilinearly; mixup draws for each
image, theirs once a batch.

Measured: not measured yet.
"""

from __future__ import annotations

from keymix.data.augment import Augment
from keymix.train.recipe import (
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
)


def recipe() -> Recipe:
    """The run, complete but for the data's path."""
    return Recipe(
        name="cskaformer_s18_imagenet",
        data=DataConfig(spec="imagenet:", image_size=224, batch_size=256, workers=8),
        augment=Augment(
            random_resized_crop=(0.08, 1.0),
            flip=True,
            auto_augment="rand-m9-mstd0.5-inc1",
            erasing=0.25,
            erasing_fill="noise",
        ),
        model=ModelConfig(name="cskaformer_s18", drop_path=0.15),
        optim=OptimConfig(name="lamb", lr=8e-3, weight_decay=0.05, accumulate=16),
        schedule=ScheduleConfig(
            name="cosine",
            epochs=310,
            warmup_epochs=20,
            cooldown_epochs=10,
            warmup_lr=1e-6,
            min_lr=1e-5,
        ),
        loss=LossConfig(label_smoothing=0.1, mixup=0.8, cutmix=1.0),
        seed=42,
    )
