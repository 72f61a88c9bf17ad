# SPDX-License-Identifier: Apache-2.0
"""Detection and instance segmentation on COCO: Mask R-CNN, Cascade Mask R-CNN, and a small one."""

from __future__ import annotations

from keymix.data.augment import Augment
from keymix.recipes import add, recipe
from keymix.train.recipe import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    replace_path,
)

_LONGER = {"schedule.epochs": 36, "schedule.milestones": (27, 33)}


@recipe
def mask_rcnn_1x() -> Recipe:
    r"""Mask R-CNN with a CSKAFormer-S18 as backbone on COCO, 12 epochs (the 1x schedule).

    Paper: Static Key Attention in Vision, https://arxiv.org/abs/2412.07049, Sec. 5.2 and Table 3:
    box AP 48.7 (AP50 70.7, AP75 53.4), mask AP 43.8 (67.6, 47.5) by the 3x schedule; CAFormer-S18
    48.6 and 43.7. The caption names Mask R-CNN and Cascade Mask R-CNN, and not which of them a row
    is. Model: Mask R-CNN, https://arxiv.org/abs/1703.06870.

        keymix train mask_rcnn_1x --data coco:PATH --out rcnn
        keymix train mask_rcnn_1x --data coco:PATH --model.weights cskaformer-run --out rcnn
        keymix train mask_rcnn_1x --data coco:PATH --model.options.backbone resnet50 \
            --model.options.pretrained true --out rcnn-r50
        keymix compare --recipe mask_rcnn_1x --data coco:PATH --no-controls --out rcnn-cmp \
            --baseline sep_conv/sep_conv/mhsa/mhsa \
            --mixers sep_conv/sep_conv/mhsa/mhsa,sep_conv/ska/mhsa/mhsa,sep_conv/cska/mhsa/mhsa

    These are CAFormer, SKAFormer and CSKAFormer. A single name, ``--mixers mhsa``, is put where the
    backbone attends, its second to fourth stage.

    The paper gives no settings of the training but the schedule. Here they are those usual for
    MetaFormer backbones: AdamW 1e-4, weight decay 0.05, batch 16, a
    tenth of the rate after 8 epochs and a hundredth after 11, horizontal flips. The short side is
    drawn from 480, 512, … 800 pixels, the long one is 1333 at most; images are tested at 800.
    Differs: no decay of the rate by layer; a step uses one device and accumulates its batch, 4
    images at a time. Start from weights of ImageNet, as the papers do: without them 12 epochs are
    too few.

    Measured: not measured at this size.
    """
    return Recipe(
        name="mask_rcnn_1x",
        data=DataConfig(
            spec="coco:coco",
            image_size=(800, 1333),
            val_fraction=0.02,
            batch_size=4,
            eval_batch_size=4,
            workers=8,
        ),
        augment=Augment(flip=True, multi_scale=(480, 800)),
        model=ModelConfig(name="mask_rcnn", options={"backbone": "cskaformer_s18"}),
        optim=OptimConfig(name="adamw", lr=1e-4, weight_decay=0.05, accumulate=4),
        schedule=ScheduleConfig(name="multistep", epochs=12, milestones=(8, 11)),
    )


add(
    "mask_rcnn_3x",
    """Mask R-CNN with a CSKAFormer-S18 as backbone on COCO, 36 epochs (the 3x schedule).

    The schedule of the static-key paper's Table 3. Settings and commands: those of
    ``mask_rcnn_1x``; the rate falls after 27 and 33 epochs.

        keymix train mask_rcnn_3x --data coco:PATH --out rcnn

    Paper: box AP 48.7 and mask AP 43.8, if Table 3, which names no detector, is of this one.
    Measured: not measured at this size.
    """,
    lambda: replace_path(mask_rcnn_1x(), _LONGER),
)

add(
    "cascade_mask_rcnn_1x",
    """Cascade Mask R-CNN with a CSKAFormer-S18 as backbone on COCO, 12 epochs (the 1x schedule).

    Model: Cascade R-CNN, https://arxiv.org/abs/1906.09756, with mask heads in its three stages.
    Settings and commands: those of ``mask_rcnn_1x``.

        keymix train cascade_mask_rcnn_1x --data coco:PATH --out cascade

    Paper: none.
    Measured: not measured at this size.
    """,
    lambda: replace_path(mask_rcnn_1x(), {"model.name": "cascade_mask_rcnn"}),
)

add(
    "cascade_mask_rcnn_3x",
    """Cascade Mask R-CNN with a CSKAFormer-S18 as backbone on COCO, 36 epochs (the 3x schedule).

    Settings and commands: those of ``cascade_mask_rcnn_1x``; the rate falls after 27 and 33 epochs.

        keymix train cascade_mask_rcnn_3x --data coco:PATH --out cascade

    Paper: none.
    Measured: not measured at this size.
    """,
    lambda: replace_path(mask_rcnn_1x(), {"model.name": "cascade_mask_rcnn", **_LONGER}),
)


@recipe
def mask_rcnn_small() -> Recipe:
    """A Mask R-CNN on a CAFormer of 0.6 M parameters, images of 192 pixels: the default.

    For a first look at your own data, and the default of `keymix compare` on images with instances:
    about half a minute per 58 images and epoch on one core, without pre-training. It shows that a
    mechanism learns, far from what it can reach.

        keymix train mask_rcnn_small --data coco:PATH --out small
        keymix compare --data coco:PATH --mixers mhsa,ska,identity --out small-cmp

    Paper: none. Short sides are 192 pixels, long ones 320 at most; the pyramid has 32 channels
    and batches have 2 images.
    Measured: box AP 0.3 after 14 epochs on 58 photographs of COCO, from which nothing is learned
    (docs/detection.md); with another backbone 93 on eight photographs that it was trained on.
    """
    return Recipe(
        name="mask_rcnn_small",
        data=DataConfig(spec="coco:", image_size=(192, 320), batch_size=2, eval_batch_size=4),
        augment=Augment(flip=True),
        model=ModelConfig(
            name="mask_rcnn",
            options={
                "backbone": "caformer_micro_32",
                "backbone_size": 192,
                "out_channels": 32,
                "proposals": 200,
                "samples": 32,
            },
        ),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05, clip_grad=1.0),
        schedule=ScheduleConfig(name="cosine", epochs=28, warmup_epochs=1),
    )
