# SPDX-License-Identifier: Apache-2.0
"""Cascade Mask R-CNN: three stages of heads, each on the boxes that the one before it refined.

Paper: Cascade R-CNN, https://arxiv.org/abs/1906.09756, Sec. 4 and 5: IoU 0.5, 0.6 and 0.7, one box
for all classes, a mask head in every stage (Fig. 7 d). Scores of the stages are averaged, each on
its own boxes, and so are the masks on the final boxes. Losses of the stages count 1, 0.5 and 0.25,
as in the authors' code and MMDetection; the boxes that train the first stage train the later ones
as it refined them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import (
    fastrcnn_loss,
    maskrcnn_inference,
    maskrcnn_loss,
)
from torchvision.ops import clip_boxes_to_image

from keymix.decoders.detection.mask_rcnn import (
    Heads,
    InstanceDecoder,
    Instances,
    LevelRoIAlign,
    Losses,
    Sizes,
)
from keymix.decoders.detection.pyramid import Maps

OVERLAPS = (0.5, 0.6, 0.7)
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)

Boxes = list[Tensor]


class CascadeHeads(nn.Module):
    """Three stages of heads.

    Args:
        pools: Of boxes and of masks, the same in all stages.
        width: Channels of a level.
        num_classes: Classes, without the background.
        options: Of evaluation, as `Heads` takes them.
    """

    stages: Any

    def __init__(
        self,
        pools: tuple[LevelRoIAlign, LevelRoIAlign],
        width: int,
        num_classes: int,
        **options: Any,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            Heads(
                pools,
                width,
                num_classes,
                overlap=overlap,
                box_weights=weights,
                agnostic=True,
                **options,
            )
            for overlap, weights in zip(OVERLAPS, BOX_WEIGHTS, strict=True)
        )

    def forward(
        self,
        features: Maps,
        proposals: Boxes,
        sizes: Sizes,
        targets: Sequence[Instances] | None = None,
    ) -> tuple[list[Instances], Losses]:
        """Return detections in evaluation and losses in training, as torchvision's heads do."""
        if self.training:
            assert targets is not None  # the model refuses to train without
            return [], self._losses(features, proposals, sizes, targets)
        return self._detect(features, proposals, sizes), {}

    def _losses(
        self, features: Maps, boxes: Boxes, sizes: Sizes, targets: Sequence[Instances]
    ) -> Losses:
        losses: Losses = {}
        for number, (stage, weight) in enumerate(
            zip(self.stages, LOSS_WEIGHTS, strict=True), start=1
        ):
            if number == 1:
                boxes, matched, labels, wanted = stage.select_training_samples(boxes, targets)
            else:
                matched, labels, wanted = _match(stage, boxes, targets)
            logits, shifts = stage.classify(features, boxes, sizes)
            of_class, of_box = fastrcnn_loss(logits, shifts, labels, wanted)
            losses[f"loss_classifier_{number}"] = weight * of_class
            losses[f"loss_box_reg_{number}"] = weight * of_box
            if stage.has_mask():
                of_mask = _mask_loss(stage, features, boxes, sizes, (matched, labels), targets)
                losses[f"loss_mask_{number}"] = weight * of_mask
            boxes = refined(stage, boxes, shifts, sizes)
        return losses

    def _detect(self, features: Maps, boxes: Boxes, sizes: Sizes) -> list[Instances]:
        scores: list[Tensor] = []
        for stage in self.stages:
            last = boxes
            logits, shifts = stage.classify(features, boxes, sizes)
            scores.append(logits.softmax(-1))
            boxes = refined(stage, boxes, shifts, sizes)
        mean = torch.stack(scores).mean(0)
        # the log of probabilities that sum to 1 are logits of theirs
        kept = self.stages[-1].postprocess_detections(mean.log(), shifts, last, sizes)
        if self.stages[0].has_mask():
            kept = (*kept, self._masks(features, kept[0], kept[2], sizes))
        names = ("boxes", "scores", "labels", "masks")[: len(kept)]
        return [dict(zip(names, each, strict=True)) for each in zip(*kept, strict=True)]

    def _masks(self, features: Maps, boxes: Boxes, labels: Boxes, sizes: Sizes) -> Boxes:
        """Average the masks of all stages on the final boxes."""
        pooled = self.stages[0].mask_roi_pool(features, boxes, sizes)
        each = [
            maskrcnn_inference(stage.mask_predictor(stage.mask_head(pooled)), labels)
            for stage in self.stages
        ]
        return [torch.stack(of_image).mean(0) for of_image in zip(*each, strict=True)]


def refined(stage: Heads, boxes: Boxes, shifts: Tensor, sizes: Sizes) -> Boxes:
    """Return the boxes that a stage makes of its own, within the images; no gradient passes."""
    moved = stage.box_coder.decode_single(shifts.detach()[:, :4], torch.cat(boxes))
    parts = moved.split([len(each) for each in boxes])
    return [clip_boxes_to_image(part, size) for part, size in zip(parts, sizes, strict=True)]


def _match(
    stage: Heads, boxes: Boxes, targets: Sequence[Instances]
) -> tuple[Boxes, Boxes, Sequence[Tensor]]:
    """Give all boxes an instance by the IoU of a stage, a label, and the regression's target."""
    truth = [each["boxes"].to(boxes[0].dtype) for each in targets]
    matched, labels = stage.assign_targets_to_proposals(
        boxes, truth, [each["labels"] for each in targets]
    )
    on = [
        found[index] if len(found) else torch.zeros_like(own)
        for found, index, own in zip(truth, matched, boxes, strict=True)
    ]
    return matched, labels, stage.box_coder.encode(on, boxes)


def _mask_loss(
    stage: Heads,
    features: Maps,
    boxes: Boxes,
    sizes: Sizes,
    found: tuple[Boxes, Boxes],
    targets: Sequence[Instances],
) -> Tensor:
    """Cross entropy of the masks of boxes that lie on an instance."""
    matched, labels = found
    inside = [torch.where(each > 0)[0] for each in labels]
    on = [own[rows] for own, rows in zip(boxes, inside, strict=True)]
    which = [own[rows] for own, rows in zip(matched, inside, strict=True)]
    pooled = stage.mask_roi_pool(features, on, sizes)
    logits = stage.mask_predictor(stage.mask_head(pooled))
    masks = [each["masks"] for each in targets]
    loss: Tensor = maskrcnn_loss(logits, on, masks, [each["labels"] for each in targets], which)
    return loss


class CascadeDecoder(InstanceDecoder):
    """The decoder of Cascade Mask R-CNN."""

    def make_heads(self, *args: Any, **options: Any) -> CascadeHeads:
        """Make three stages."""
        return CascadeHeads(*args, **options)

    @property
    def stages(self) -> list[Heads]:
        """The three stages."""
        return [*self.roi_heads.stages]
