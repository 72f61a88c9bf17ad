# SPDX-License-Identifier: Apache-2.0
r"""CSKAFormer-S18 fine-tuned at 384 pixels from a run at 224.

Paper: MetaFormer Baselines for Vision, https://arxiv.org/abs/2210.13452, fine-tunes CAFormer-S18
so: 85.0 % at 384 pixels after 83.6 % at 224. The static-key paper has no figure at 384 pixels.

    keymix train cskaformer_s18_384 --data imagenet:PATH --model.weights cskaformer-s18 --out at-384
    keymix train cskaformer_s18_384 --data imagenet:PATH --model.weights skaformer-s18 \
        --model skaformer_s18 --out ska-at-384

LAMB at a constant 1e-4, batch 1024, 30 epochs, no mixup or cutmix, averaging 0.9999, drop path 0.3,
dropout before the classifier 0.4; augmentation as in ``cskaformer_s18_imagenet``. The learned keys
of the 28 x 28 grid are resampled to 48 x 48 before the first step, as position embeddings are, and
train on; with them the model has more parameters than at 224 pixels.
Differs: 64 images a step and 16 steps an update make 1024 on one device; else as in the parent.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import cskaformer_s18_imagenet
from keymix.train.recipe import LossConfig, OptimConfig, Recipe, ScheduleConfig


def recipe() -> Recipe:
    """The run, complete but for the data's path and the run it starts from."""
    parent = cskaformer_s18_imagenet.recipe()
    return replace(
        parent,
        name="cskaformer_s18_384",
        data=replace(parent.data, image_size=384, batch_size=64),
        model=replace(parent.model, drop_path=0.3, drop_rate=0.4, weights="RUN"),
        optim=OptimConfig(name="lamb", lr=1e-4, weight_decay=0.05, accumulate=16),
        schedule=ScheduleConfig(name="constant", epochs=30),
        loss=LossConfig(label_smoothing=0.1),
        ema=0.9999,
    )
