# SPDX-License-Identifier: Apache-2.0
"""SETR on ViT-B/16 with softmax attention on UW-Madison GI Tract: the KV paper's baseline.

Paper: Hwa et al., KV attention in SETR, https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.3 and
Table 2. Published, one run: Jaccard 0.8718, weighted Jaccard 0.8653, 91.04 M parameters, 21.07 G
multiply-adds; with key-value attention (``setr_kv_uwgi``) 0.8727, 0.8667.

    keymix train setr_qkv_uwgi --data uwgi:PATH --out setr-qkv
    keymix compare --recipe setr_qkv_uwgi --data uwgi:PATH --mixers 'mhsa,kv,kv(pos_dim=50)' \
        --seeds 3 --out setr-cmp

The paper's settings: AdamW 1e-4, polynomial schedule of power 0.9 without warm-up, 100 epochs,
batch 32, images of 224x224, no pre-training; horizontal and vertical flip, shift-scale-rotate,
coarse dropout, brightness and contrast, each with probability 0.5; 80 : 16 : 4.
Not told there: the loss (here the cross entropy of pixels), the weight decay (here 0.01, that of
PyTorch), how the splits were drawn (here whole cases; ``--data.split_by slice`` spreads a case over
them), the strengths of the augmentations, and how the Jaccard indices are averaged (here over
organs, of the counts of all slices of the split).
Differs: the schedule moves at every update; the last epoch is told, and beside it the best on the
validation split.

Measured: not measured at this size.
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
        name="setr_qkv_uwgi",
        data=DataConfig(
            spec="uwgi:uw-madison-gi",
            image_size=224,
            val_fraction=1 / 6,
            batch_size=32,
            eval_batch_size=32,
            workers=8,
        ),
        augment=Augment(
            flip=True,
            vertical_flip=True,
            shift_scale_rotate=True,
            coarse_dropout=True,
            brightness_contrast=True,
        ),
        model=ModelConfig(name="setr_qkv"),
        optim=OptimConfig(name="adamw", lr=1e-4, weight_decay=0.01),
        schedule=ScheduleConfig(name="poly", power=0.9, epochs=100),
    )
