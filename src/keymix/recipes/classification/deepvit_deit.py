# SPDX-License-Identifier: Apache-2.0
"""DeepViT-S and -L on ImageNet-1k under DeiT's recipe, without its repeated augmentation.

Paper: DeepViT, https://arxiv.org/abs/2103.11886, Table 8. Published top-1: DeepViT-S 82.3 % (27 M
parameters; 81.4 % under the ablations' settings), DeepViT-L 83.1 % (58 M: the width of 420); for
scale, DeiT-S 79.8 %, DeiT-B 81.8 %. Counted here: 27,312,632 and 58,883,708 parameters.

    keymix train deepvit_deit --data imagenet:PATH --out deepvit-s
    keymix train deepvit_deit --data imagenet:PATH --model deepvit_l_420 --out deepvit-l

DeiT's settings (https://arxiv.org/abs/2012.12877, Table 9): AdamW, 5e-4 for 512 images, so 1e-3 at
its batch of 1024; weight decay 0.05, cosine over 300 epochs, 5 of warm-up from 1e-6, down to 1e-5;
RandAugment m9-mstd0.5-inc1, erasing 0.25 by noise, mixup 0.8, cutmix 1.0, smoothing 0.1, drop path
0.1, no dropout, no averaging.
Differs: 256 images a step and 4 steps an update make 1024 on one device; else as in
``deepvit_imagenet``. The authors' code scales the branches of S and L besides, which the paper does
not tell (``--model.options.residual_scale 0.5``).

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import deepvit_imagenet
from keymix.train.recipe import LossConfig, OptimConfig, Recipe


def recipe() -> Recipe:
    """The run, complete but for the data's path."""
    parent = deepvit_imagenet.recipe()
    return replace(
        parent,
        name="deepvit_deit",
        augment=replace(parent.augment, erasing=0.25, erasing_fill="noise"),
        model=replace(parent.model, name="deepvit_s", drop_path=0.1),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, accumulate=4),
        schedule=replace(parent.schedule, warmup_epochs=5),
        loss=LossConfig(label_smoothing=0.1, mixup=0.8, cutmix=1.0),
    )
