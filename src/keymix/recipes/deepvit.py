# SPDX-License-Identifier: Apache-2.0
"""DeepViT, https://arxiv.org/abs/2103.11886: re-attention in deep ViTs on ImageNet-1k."""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes import recipe
from keymix.recipes.imagenet import AUGMENT, imagenet
from keymix.train.recipe import (
    LossConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    replace_path,
)


@recipe
def deepvit_imagenet() -> Recipe:
    r"""DeepViT and ViT of 16 to 32 blocks on ImageNet-1k, settings of DeepViT's ablations.

    Paper: DeepViT, https://arxiv.org/abs/2103.11886. Published top-1, Table 4: ViT 78.9, 79.4,
    79.3 % and DeepViT 79.1, 80.1, 80.9 % at 16, 24, 32 blocks (24.4, 36.3, 48.1 M parameters).
    Table 1, 12 blocks of width 256, 384, 512, 768: 74.6, 77.86, 78.8, 79.3 %. Table 6: DeepViT-S
    81.4, -L 82.2 %.

        keymix train deepvit_imagenet --data imagenet:PATH --out deepvit-24b
        keymix train deepvit_imagenet --data imagenet:PATH --model vit_24b --out vit-24b
        keymix train deepvit_imagenet --data imagenet:PATH --model deepvit_l --out deepvit-l

    The comparisons. Table 5, 32 blocks: plain 79.3, linearly decayed temperature 79.0, learnable
    79.5, dropped attention 79.5, re-attention 80.9 %; the paper names neither the ends of the decay
    nor the rate of dropping, so those below are ours. Table 3: sharing one map among the last 11 of
    24 blocks 78.7 against 79.3 %, among 15 of 32 blocks 79.2 against 79.2 %. Fig. 9: re-attention
    in the last K of 16 blocks, best at K = 5. Eq. 6: similarity of neighbouring maps in the loss.

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
    RandAugment. What the paper leaves open is the authors' code's (zhoudaquan/dvit_repo): weight
    decay 0.05, mixup 0.8, RandAugment m9-mstd0.5-inc1, warm-up from 1e-6, down to 1e-5. The code
    has more than the paper says; with it:

        keymix train deepvit_imagenet --data imagenet:PATH --out as-the-code --loss.cutmix 1.0 \
            --loss.label_smoothing 0.1 --augment.erasing 0.25 --augment.erasing_fill noise \
            --model.drop_path 0.2 --ema 0.99996 --schedule.epochs 310 --schedule.warmup_epochs 5 \
            --schedule.cooldown_epochs 10

    Its S and L also scale their branches (``--model.options.residual_scale 0.5``). Its 32-block run
    has mixup 0.1, no cutmix, and the similarity term with 12 blocks at weight 0.1.
    Differs: a batch of 256 on one device, theirs over eight, so each of their BatchNorms saw 32
    images; a tenth of the training images is the validation split, which chooses the best epoch;
    mean and deviation are measured on the training images, theirs are 0.5. The code's colour jitter
    is left out: timm ignores it with RandAugment.

    Measured: not measured yet.
    """
    return Recipe(
        name="deepvit_imagenet",
        data=imagenet(batch_size=256),
        augment=replace(AUGMENT, erasing=0.0, erasing_fill="mean"),
        model=ModelConfig(name="deepvit_24b"),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05),
        schedule=ScheduleConfig(
            name="cosine", epochs=300, warmup_epochs=3, warmup_lr=1e-6, min_lr=1e-5
        ),
        loss=LossConfig(mixup=0.8),
    )


@recipe
def deepvit_depth() -> Recipe:
    r"""Accuracy against depth on ImageNet-1k, 12 to 32 blocks, with and without re-attention.

    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Fig. 1: the plain ViT stops gaining after 24
    blocks, the one with re-attention does not. Published top-1 at 16, 24, 32 blocks (Table 4): ViT
    78.9, 79.4, 79.3 %, DeepViT 79.1, 80.1, 80.9 %; ViT at 12 blocks 77.86 % (Table 1). Blocks whose
    maps are like their neighbour's: 5, 11, 16 in ViT, none in DeepViT.

        keymix train deepvit_depth --data imagenet:PATH --out curve/vit-12
        for depth in 16 24 32; do
            keymix train deepvit_depth --data imagenet:PATH --model vit_${depth}b \
                --out curve/vit-$depth
        done
        for depth in 12 16 24 32; do
            keymix train deepvit_depth --data imagenet:PATH --model deepvit_${depth}b \
                --out curve/deepvit-$depth
        done

    On a small scale, with CIFAR images and two cores, one comparison per depth, which also reports
    how similar the maps of neighbouring blocks are:

        for depth in 4 8 16 24; do
            keymix compare --recipe small_images_vit --data parquet:PATH \
                --model deepvit_micro_p4_32 --model.options.depth $depth \
                --mixers mhsa,re_attention --seeds 3 --out curve/depth-$depth
        done

    Settings and differences: those of ``deepvit_imagenet``.

    Measured: not measured yet.
    """
    return replace_path(deepvit_imagenet(), {"model.name": "vit_12b"})


@recipe
def deepvit_deit() -> Recipe:
    """DeepViT-S and -L on ImageNet-1k under DeiT's recipe, without its repeated augmentation.

    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Table 8. Published top-1: DeepViT-S 82.3 %
    (27 M parameters; 81.4 % under the ablations' settings), DeepViT-L 83.1 % (58 M: the width of
    420); for scale, DeiT-S 79.8 %, DeiT-B 81.8 %. Counted here: 27,312,632 and 58,883,708
    parameters.

        keymix train deepvit_deit --data imagenet:PATH --out deepvit-s
        keymix train deepvit_deit --data imagenet:PATH --model deepvit_l_420 --out deepvit-l

    DeiT's settings (https://arxiv.org/abs/2012.12877, Table 9): AdamW, 5e-4 for 512 images, so 1e-3
    at its batch of 1024; weight decay 0.05, cosine over 300 epochs, 5 of warm-up from 1e-6, down to
    1e-5; RandAugment m9-mstd0.5-inc1, erasing 0.25 by noise, mixup 0.8, cutmix 1.0, smoothing 0.1,
    drop path 0.1, no dropout, no averaging.
    Differs: 256 images per step and 4 steps per update make 1024 on one device; else as in
    ``deepvit_imagenet``. The authors' code also scales the branches of S and L, which the paper
    does not mention (``--model.options.residual_scale 0.5``).

    Measured: not measured yet.
    """
    parent = deepvit_imagenet()
    return replace(
        parent,
        augment=AUGMENT,
        model=ModelConfig(name="deepvit_s", drop_path=0.1),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, accumulate=4),
        schedule=replace(parent.schedule, warmup_epochs=5),
        loss=LossConfig(label_smoothing=0.1, mixup=0.8, cutmix=1.0),
    )


@recipe
def deepvit_384() -> Recipe:
    """DeepViT-L fine-tuned at 384 pixels from a run at 224.

    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Table 6: 84.3 % at 384 pixels after 83.1 % at
    224. Counted here: 59,043,308 parameters and 44.8 GMACs; the paper prints 58 M and 12.8 G, which
    is the cost at 224 pixels.

        keymix train deepvit_deit --data imagenet:PATH --model deepvit_l_420 --out deepvit-l
        keymix train deepvit_384 --data imagenet:PATH --model.weights deepvit-l --out deepvit-l-384

    The paper gives no settings; these are DeiT's for the same step (its published command): AdamW
    at 5e-6 for a batch of 512, weight decay 1e-8, 30 epochs, 5 of warm-up from 1e-6, then constant;
    the rest as before. Position embeddings are resampled bicubically before the first step.
    Differs: 64 images per step and 8 steps per update make 512 on one device, so BatchNorm, which
    stays in training, sees 64 images; else as in ``deepvit_deit``.

    Measured: not measured yet.
    """
    parent = deepvit_deit()
    return replace(
        parent,
        data=imagenet(image_size=384, batch_size=64),
        model=replace(parent.model, name="deepvit_l_420", weights="RUN"),
        optim=OptimConfig(name="adamw", lr=5e-6, weight_decay=1e-8, accumulate=8),
        schedule=replace(parent.schedule, epochs=30, min_lr=5e-6),
    )
