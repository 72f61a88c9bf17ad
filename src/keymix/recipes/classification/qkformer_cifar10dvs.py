# SPDX-License-Identifier: Apache-2.0
r"""QKFormer HST-2-256 on CIFAR10-DVS, events in 16 or 10 frames.

Paper: QKFormer, https://arxiv.org/abs/2403.16552. Published top-1, Table 3: 84.0 % at T = 16,
83.8 % at T = 10. The authors' log has 84.1 % at its best epoch on the test set, 83.3 % at its last.
Table 4, at T = 16: Spikformer with its own stem 80.9, with QKFormer's embeddings 82.2 %.

    keymix train qkformer_cifar10dvs --data cifar10dvs:PATH --out hst
    keymix train qkformer_cifar10dvs --data cifar10dvs:PATH --data.time_steps 10 --out hst-t10
    keymix train qkformer_cifar10dvs --data cifar10dvs:PATH --model spikformer_2_256 --out sps
    keymix train qkformer_cifar10dvs --data cifar10dvs:PATH --model spikformer_2_256 --out peds \
        --model.options.stem peds

The batch: 16 recordings on 1 device, no accumulation, 16 x 1 x 1 = 16 an update, at a rate of 5e-3
that is not scaled. The settings are the published code's: AdamW, weight decay 0.06, 96 epochs and
10 of cool-down (the paper's 106), 10 of warm-up from 1e-5, down to 1e-5; mixup 0.5 on half of them
until epoch 75, label smoothing 0.1, stochastic depth 0.1; flip, and one of shear, translation,
rotation and cutout. The split is the first nine tenths of every class.
Differs: mixup draws a share a recording, and which are mixed, theirs for a batch; a tenth of the
training recordings is held out to choose the best epoch on.

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
        name="qkformer_cifar10dvs",
        data=DataConfig(
            spec="cifar10dvs:", batch_size=16, time_steps=16, event_split="first90", workers=4
        ),
        augment=Augment(flip=True, snn_wide=True),
        model=ModelConfig(name="qkformer_hst_2_256", drop_path=0.1),
        optim=OptimConfig(name="adamw", lr=5e-3, weight_decay=0.06),
        schedule=ScheduleConfig(
            name="cosine",
            epochs=106,
            warmup_epochs=10,
            cooldown_epochs=10,
            warmup_lr=1e-5,
            min_lr=1e-5,
        ),
        loss=LossConfig(label_smoothing=0.1, mixup=0.5, mixup_prob=0.5, mixup_off_epoch=75),
        seed=2021,
    )
