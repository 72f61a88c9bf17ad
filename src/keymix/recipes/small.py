# SPDX-License-Identifier: Apache-2.0
"""Small recipes, for minutes to hours on a CPU: the defaults of comparisons. No paper."""

from __future__ import annotations

from keymix.data.augment import Augment
from keymix.recipes import recipe
from keymix.recipes.setr import AUGMENT
from keymix.train.recipe import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    TaskConfig,
)


@recipe
def digits_vit() -> Recipe:
    """A small ViT on handwritten digits, each at its own place on a 12x12 canvas: the default.

    No download, seconds on one CPU thread. A digit can be anywhere on the canvas, so its tokens
    must exchange information: a model without token mixing falls behind.

        keymix train digits_vit --out digits

    Paper: none. Data: scikit-learn's bundled digits; 1,213 images train, 135 validation, 449 test.
    Measured: test top-1 of the last epoch over seeds 0, 1, 2, mean ± standard deviation: softmax
    97.3 ± 0.6 %, identity 92.9 ± 0.9 % (`keymix compare`, two EPYC threads, torch 2.15). Learning
    rate, epochs and warm-up are those with which a comparison of three minutes finds nothing
    against itself, at seeds that no default has (docs/results/first-run.md). The rate ends at a
    tenth: where it falls to 0, validation rises in the last epochs whatever is left to learn.
    Padding, at 8e-3 and seed 100: 83.0 % without, 93.9 % with 2 pixels. For scale: logistic
    regression 33.2 %, a plain convolutional network 98.3 %.
    """
    return Recipe(
        name="digits_vit",
        data=DataConfig(spec="digits", batch_size=64),
        augment=Augment(crop_padding=1),
        model=ModelConfig(name="vit_nano_p4_12"),
        optim=OptimConfig(
            name="adamw", lr=5e-3, weight_decay=0.05, betas=(0.9, 0.98), clip_grad=1.0
        ),
        schedule=ScheduleConfig(name="cosine", epochs=104, warmup_epochs=10.4, min_lr=5e-4),
    )


@recipe
def small_images_vit() -> Recipe:
    """A ViT of width 128 and 4 blocks on small colour images such as CIFAR-10, a few epochs.

    For minutes to an afternoon on two CPU cores: enough to see a mechanism learn, far from what it
    can reach. `keymix compare` takes it for any images, and fits size, patches, flips and epochs to
    them (docs/compare.md).

        keymix train small_images_vit --data parquet:PATH --limit 10000 --out small

    Paper: none; crop and flip are the usual for 32x32 images. Patches are embedded by strided 3x3
    convolutions (https://arxiv.org/abs/2106.14881), with which small sets are learned sooner.
    Measured: on 10,000 CIFAR-10 images, one seed, test top-1 of the last epoch 50.5 %, 234 s on one
    of two busy threads of an AMD EPYC, torch 2.15 (the command above); logistic regression on 16x16
    pixels 39.1 %. The learning rate was chosen on validation, by one run each: 49.9, 51.0, 49.9,
    43.6 % at 3e-4, 5e-4, 1e-3, 2e-3.
    """
    return Recipe(
        name="small_images_vit",
        data=DataConfig(spec="parquet:", image_size=32, batch_size=32),
        augment=Augment(crop_padding=4, flip=True),
        model=ModelConfig(name="vit_micro_conv_p4_32"),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05, clip_grad=1.0),
        schedule=ScheduleConfig(name="cosine", epochs=5, warmup_epochs=0.5),
    )


@recipe
def moving_digits_qkformer() -> Recipe:
    """A small QKFormer on moving digits, events in four frames: the default for events.

    No download, a few minutes on one thread of a CPU. `keymix compare` uses it for every data set
    of events, and for spiking mixers without `--data`.

        keymix train moving_digits_qkformer --out moving
        keymix compare --data moving_digits --mixers qkta,qkca,ssa --out moving-cmp

    Paper: none; the model is QKFormer's (https://arxiv.org/abs/2403.16552) made small. Data: events
    that a camera of 32x32 pixels would see of scikit-learn's digits; 1,213 recordings train, 135
    validation, 449 test.
    Measured: test top-1 of the last epoch over seeds 0, 1, 2, mean ± standard deviation, 84.8 ±
    1.8 % (validation 81.7 ± 2.8 %; chance 10 %), by the first command with `--seed 0`, `1`, `2`;
    266, 288 and 351 s per run on one thread of a Xeon whose two cores other programs kept busy,
    torch 2.15. The learning rate was chosen among 1e-3, 2e-3 and 4e-3 by one run each at another
    seed, on validation.
    """
    return Recipe(
        name="moving_digits_qkformer",
        data=DataConfig(spec="moving_digits", time_steps=4, batch_size=32),
        augment=Augment(snn_wide=True),
        model=ModelConfig(name="qkformer_micro_32"),
        optim=OptimConfig(name="adamw", lr=4e-3, weight_decay=0.05, clip_grad=1.0),
        schedule=ScheduleConfig(name="cosine", epochs=20, warmup_epochs=1),
    )


@recipe
def small_masks_unet() -> Recipe:
    """A small U-Net with attention at 1/16 on images with masks, for minutes on two cores.

    For a first look at your own masks, and the default of `keymix compare` on masks: enough to see
    a mechanism learn, far from what it can reach.

        keymix train small_masks_unet --data masks:PATH --out small
        keymix train small_masks_unet --data uwgi:PATH --out organs
        keymix compare --data uwgi:PATH --mixers 'mhsa,kv,kv(pos_dim=50)' --out organs-cmp

    Paper: none; the model is TransUNet's idea made small (https://arxiv.org/abs/2102.04306),
    schedule and augmentations are those of the KV paper (``setr_qkv_uwgi``), the learning rate is a
    small net's, and half of the loss is Dice, so that small organs count.
    Measured: docs/results/segmenters.md, next to a U-Net without attention and a SETR.
    """
    return Recipe(
        name="small_masks_unet",
        data=DataConfig(
            spec="masks:", image_size=96, val_fraction=1 / 6, batch_size=4, eval_batch_size=64
        ),
        augment=AUGMENT,
        model=ModelConfig(name="trans_unet_micro"),
        optim=OptimConfig(name="adamw", lr=3e-3, weight_decay=0.01, clip_grad=1.0),
        schedule=ScheduleConfig(name="poly", power=0.9, epochs=60),
        task=TaskConfig(options={"dice": 0.5}),
    )
