# SPDX-License-Identifier: Apache-2.0
"""DeepViT-L fine-tuned at 384 pixels from a run at 224.

Paper: DeepViT, https://arxiv.org/abs/2103.11886, Table 6: 84.3 % at 384 pixels after 83.1 % at 224.
Counted here: 59,043,308 parameters and 44.8 GMACs; the paper prints 58 M and 12.8 G, which is the
cost at 224 pixels.

    keymix train deepvit_deit --data imagenet:PATH --model deepvit_l_420 --out deepvit-l
    keymix train deepvit_384 --data imagenet:PATH --model.weights deepvit-l --out deepvit-l-384

The paper gives no settings; these are DeiT's for the same step (its published command): AdamW at
5e-6 for a batch of 512, weight decay 1e-8, 30 epochs, 5 of warm-up from 1e-6, then constant; the
rest as before. Position embeddings are resampled bicubically before the first step.
Differs: 64 images a step and 8 steps an update make 512 on one device, so BatchNorm, which stays in
training, sees 64 images; else as in ``deepvit_deit``.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import deepvit_deit
from keymix.train.recipe import OptimConfig, Recipe, ScheduleConfig


def recipe() -> Recipe:
    """The run, complete but for the data's path and the run it starts from."""
    parent = deepvit_deit.recipe()
    return replace(
        parent,
        name="deepvit_384",
        data=replace(parent.data, image_size=384, batch_size=64),
        model=replace(parent.model, name="deepvit_l_420", weights="RUN"),
        optim=OptimConfig(name="adamw", lr=5e-6, weight_decay=1e-8, accumulate=8),
        schedule=ScheduleConfig(
            name="cosine", epochs=30, warmup_epochs=5, warmup_lr=1e-6, min_lr=5e-6
        ),
    )
