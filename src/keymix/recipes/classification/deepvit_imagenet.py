# SPDX-License-Identifier: Apache-2.0
r"""DeepViT and ViT of 16 to 32 blocks on ImageNet-1k, under the settings of DeepViT's ablations.

Paper: DeepViT, https://arxiv.org/abs/2103.11886. Published top-1, Table 4: ViT 78.9, 79.4, 79.3 %
and DeepViT 79.1, 80.1, 80.9 % at 16, 24, 32 blocks (24.4, 36.3, 48.1 M parameters). Table 1, 12
blocks of width 256, 384, 512, 768: 74.6, 77.86, 78.8, 79.3 %. Table 6: DeepViT-S 81.4, -L 82.2 %.

    keymix train deepvit_imagenet --data imagenet:PATH --out deepvit-24b
    keymix train deepvit_imagenet --data imagenet:PATH --model vit_24b --out vit-24b
    keymix train deepvit_imagenet --data imagenet:PATH --model deepvit_l --out deepvit-l

The comparisons. Table 5, 32 blocks: plain 79.3, linearly decayed temperature 79.0, learnable 79.5,
dropped attention 79.5, re-attention 80.9 %; the paper names neither the ends of the decay nor the
rate of dropping, so those below are ours. Table 3: sharing one map among the last 11 of 24 blocks
78.7 against 79.3 %, among 15 of 32 blocks 79.2 against 79.2 %. Fig. 9: re-attention in the last K
of 16 blocks, best at K = 5. Eq. 6: likeness of neighbouring maps in the loss.

    keymix train deepvit_imagenet --data imagenet:PATH --model vit_32b --out decayed \
        --model.options.temperature_decay "[1.0, 0.5]"
    keymix train deepvit_imagenet --data imagenet:PATH --model vit_32b --out learnable \
        --mixer "softmax(temperature=true)"
    keymix train deepvit_imagenet --data imagenet:PATH --model vit_32b --out dropped \
        --mixer "softmax(attn_drop=0.1)"
    keymix train deepvit_imagenet --data imagenet:PATH --model vit_32b --out shared \
        --model.options.shared_from 17
    keymix train deepvit_imagenet --data imagenet:PATH --model deepvit_16b --out last-5 \
        --model.options.last_blocks 5
    keymix train deepvit_imagenet --data imagenet:PATH --model vit_24b --out unlike \
        --loss.similarity 0.1 --loss.similarity_blocks 8

The settings are Sec. 5.1's: AdamW 5e-4, cosine, 300 epochs, 3 of warm-up, batch 256, mixup and
RandAugment. What the paper leaves open is the authors' code's (zhoudaquan/dvit_repo): weight decay
0.05, mixup 0.8, RandAugment m9-mstd0.5-inc1, warm-up from 1e-6, down to 1e-5. The code has more
than the paper says; with it:

    keymix train deepvit_imagenet --data imagenet:PATH --out as-the-code --loss.cutmix 1.0 \
        --loss.label_smoothing 0.1 --augment.erasing 0.25 --augment.erasing_fill noise \
        --model.drop_path 0.2 --ema 0.99996 --schedule.epochs 310 --schedule.warmup_epochs 5 \
        --schedule.cooldown_epochs 10

Its S and L also scale their branches (``--model.options.residual_scale 0.5``). Its 32-block run has
mixup 0.1, no cutmix, and the likeness term with 12 blocks at weight 0.1.
Differs: a batch of 256 on one device, theirs over eight, so each of their BatchNorms saw 32 images;
a tenth of the training images is held out to choose the best epoch on; mean and deviation are
measured on the training images, theirs are 0.5. The code's colour jitter is left out, as timm
leaves it out beside RandAugment.

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
        name="deepvit_imagenet",
        data=DataConfig(spec="imagenet:", image_size=224, batch_size=256, workers=8),
        augment=Augment(
            random_resized_crop=(0.08, 1.0),
            flip=True,
            auto_augment="rand-m9-mstd0.5-inc1",
        ),
        model=ModelConfig(name="deepvit_24b"),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05),
        schedule=ScheduleConfig(
            name="cosine", epochs=300, warmup_epochs=3, warmup_lr=1e-6, min_lr=1e-5
        ),
        loss=LossConfig(mixup=0.8),
    )
