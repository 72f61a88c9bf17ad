# SPDX-License-Identifier: Apache-2.0
r"""QKFormer HST-10 on ImageNet-1k: three widths, four time steps or one, larger images at the end.

Paper: QKFormer, https://arxiv.org/abs/2403.16552. Published top-1, Table 2: HST-10-384 78.80,
-512 82.04, -768 84.22 % at T = 4, -768 81.69 % at T = 1; -768 at 288 pixels 85.25, at 384 pixels
85.65 % (top-5 97.74 %).

    keymix train qkformer_imagenet --data imagenet:PATH --out hst-384
    keymix train qkformer_imagenet --data imagenet:PATH --model qkformer_hst_10_512 --out hst-512
    keymix train qkformer_imagenet --data imagenet:PATH --model qkformer_hst_10_768 --out hst-768
    keymix train qkformer_imagenet --data imagenet:PATH --model qkformer_hst_10_768 --out t1 \
        --model.options.time_steps 1

    keymix eval hst-768 --image-size 288
    keymix eval hst-768 --image-size 384

The 85.65 % at 384 pixels seem to be more than an evaluation: the log of that figure tells learning
rates (5.6e-6 down to 5e-7) and losses of nine further epochs, of which it is the best on the test
set. To go on so from a run:

    keymix train qkformer_imagenet --data imagenet:PATH --model qkformer_hst_10_768 --out at-384 \
        --data.image_size 384 --model.weights hst-768 --optim.lr 5.6e-6 --schedule.min_lr 5e-7 \
        --schedule.epochs 10 --schedule.warmup_epochs 0

The batch: 32 images x 1 device x 16 steps = 512 an update, at 6e-4 x 512 / 256 = 1.2e-3; a run uses
one device. Theirs was 32 x 8 devices x 2 steps = 512; their -768 run had 24 x 8 x 3 = 576, at
1.35e-3: ``--data.batch_size 24 --optim.accumulate 24 --optim.lr 1.35e-3``. A BatchNorm sees the
images of one step, as theirs sees those of one device and step. AdamW, weight decay 0.05, 200
epochs, 5 of warm-up, down to 1e-6; RandAugment m9-mstd0.5-inc1, a quarter erased to noise, label
smoothing 0.1, stochastic depth 0.1, no mixup or cutmix. Their runs took 4.5, 6 and 13 days on 8
GPUs.
Differs: a tenth of the training images is held out to choose the best epoch on; mean and deviation
are measured on the training images.

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
        name="qkformer_imagenet",
        data=DataConfig(spec="imagenet:", image_size=224, batch_size=32, workers=8),
        augment=Augment(
            random_resized_crop=(0.08, 1.0),
            flip=True,
            auto_augment="rand-m9-mstd0.5-inc1",
            erasing=0.25,
            erasing_fill="noise",
        ),
        model=ModelConfig(name="qkformer_hst_10_384", drop_path=0.1),
        optim=OptimConfig(name="adamw", lr=1.2e-3, weight_decay=0.05, accumulate=16),
        schedule=ScheduleConfig(
            name="cosine", epochs=200, warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-6
        ),
        loss=LossConfig(label_smoothing=0.1),
    )
