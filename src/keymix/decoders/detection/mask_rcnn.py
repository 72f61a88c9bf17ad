# SPDX-License-Identifier: Apache-2.0
"""Mask R-CNN behind a feature pyramid: proposals, then class, box and mask of each instance.

Papers: Faster R-CNN, https://arxiv.org/abs/1506.01497; Mask R-CNN, https://arxiv.org/abs/1703.06870
(Sec. 3, Fig. 4 right); both by torchvision's parts with its numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops.poolers import initLevelMapper

from keymix.decoders.detection.pyramid import COARSEST, FeaturePyramid, Maps, SimplePyramid

Instances = dict[str, Tensor]
"""Instances of an image: ``boxes`` [n, 4] (x1, y1, x2, y2 in pixels), ``labels`` [n] from 1, in the
truth ``masks`` [n, H, W], in answers ``scores`` [n] and ``masks`` [n, 28, 28] within the boxes;
no masks where there is no head of them."""
Losses = dict[str, Tensor]
Sizes = list[tuple[int, int]]

RATIOS = (0.5, 1.0, 2.0)  # height over width of anchors
ANCHOR = 8  # side of an anchor over the reduction of its level: 32 on P2 to 512 on P6
BOX_GRID, MASK_GRID = 7, 14  # positions that an instance is pooled to
HIDDEN = 1024  # width of the two layers before class and box
MASK_WIDTHS = (256, 256, 256, 256)
POSITIVE = 0.25  # share, at most, of the proposals that train the heads that lie on an instance


def full_precision(x: Tensor) -> Tensor:
    """Return numbers that boxes can be computed with: 16 bits become 32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor has numbers: not on the ``meta`` device, nor while costs are counted."""
    return not (x.is_meta or isinstance(x, FakeTensor))


class ProposalHead(RPNHead):
    """torchvision's, whose answers are in full precision under autocast."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return objectness and shifts of the anchors on every level."""
        logits, shifts = super().forward(x)
        return [*map(full_precision, logits)], [*map(full_precision, shifts)]


class BoxPredictor(FastRCNNPredictor):
    """Class and box of a proposal, in full precision under autocast.

    Args:
        dim: Channels of a proposal's features.
        num_classes: Classes; one more stands for the background.
        agnostic: One box for all classes in place of one for each.
    """

    def __init__(self, dim: int, num_classes: int, *, agnostic: bool = False) -> None:
        super().__init__(dim, num_classes + 1)
        self.agnostic = agnostic
        if agnostic:
            self.bbox_pred = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[n, K + 1]`` and shifts ``[n, 4 (K + 1)]``."""
        logits, shifts = map(full_precision, super().forward(x))
        return logits, shifts.repeat(1, logits.shape[1]) if self.agnostic else shifts


class MaskPredictor(MaskRCNNPredictor):
    """torchvision's, whose answers are in full precision under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[n, K + 1, 28, 28]``."""
        return full_precision(super().forward(x))


class LevelRoIAlign(MultiScaleRoIAlign):
    """torchvision's, with the reductions of the levels given; it infers them from sizes of images.

    Args:
        reductions: Of the levels for instances.
        grid: Positions that an instance is pooled to, along each side.
    """

    def __init__(self, reductions: Sequence[int], grid: int) -> None:
        super().__init__([str(i) for i in range(len(reductions))], grid, sampling_ratio=2)
        self.scales = [1 / each for each in reductions]
        lowest, highest = (each.bit_length() - 1 for each in (reductions[0], reductions[-1]))
        self.map_levels = initLevelMapper(lowest, highest)


class Heads(RoIHeads):
    """torchvision's heads of boxes and masks, of one width for all backbones.

    Args:
        pools: Of boxes and of masks.
        width: Channels of a level.
        num_classes: Classes, without the background.
        masks: Whether there is a head of masks.
        overlap: IoU with an instance from which on a proposal is one of it.
        box_weights: Of x, y, width and height in the regression of boxes.
        agnostic: One box for all classes.
        samples: Proposals of an image that train the heads.
        score_threshold: Least score of a detection.
        nms_threshold: IoU from which on the lower of two detections of a class is dropped.
        detections: Most detections of an image.
    """

    # torchvision's
    box_head: Any
    box_predictor: Any
    box_coder: Any
    mask_head: Any
    mask_predictor: Any
    box_roi_pool: Any
    mask_roi_pool: Any

    def __init__(
        self,
        pools: tuple[LevelRoIAlign, LevelRoIAlign],
        width: int,
        num_classes: int,
        *,
        masks: bool,
        overlap: float = 0.5,
        box_weights: Sequence[float] = (10.0, 10.0, 5.0, 5.0),
        agnostic: bool = False,
        samples: int,
        score_threshold: float,
        nms_threshold: float,
        detections: int,
    ) -> None:
        super().__init__(
            pools[0],
            TwoMLPHead(width * BOX_GRID**2, HIDDEN),
            BoxPredictor(HIDDEN, num_classes, agnostic=agnostic),
            overlap,
            overlap,
            samples,
            POSITIVE,
            tuple(box_weights),
            score_threshold,
            nms_threshold,
            detections,
            pools[1] if masks else None,
            MaskRCNNHeads(width, MASK_WIDTHS, 1) if masks else None,
            MaskPredictor(MASK_WIDTHS[-1], MASK_WIDTHS[-1], num_classes + 1) if masks else None,
        )

    def classify(self, features: Maps, boxes: list[Tensor], sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Return logits and shifts of boxes."""
        pooled = self.box_roi_pool(features, boxes, sizes)
        found: tuple[Tensor, Tensor] = self.box_predictor(self.box_head(pooled))
        return found

    def outline(self, features: Maps, boxes: int, masks: int) -> list[Tensor]:
        """Run the heads on as many boxes and masks, wherever they are; nothing reads numbers."""
        level = features["0"]

        def pooled(count: int, grid: int) -> Tensor:
            found: Tensor = roi_align(level, level.new_zeros(count, 5), grid, sampling_ratio=2)
            return found

        logits, shifts = self.box_predictor(self.box_head(pooled(boxes, BOX_GRID)))
        if not self.has_mask():
            return [logits, shifts]
        return [logits, shifts, self.mask_predictor(self.mask_head(pooled(masks, MASK_GRID)))]

    def last_layers(self) -> list[tuple[nn.Module, str]]:
        """Return what depends on the number of classes: the owner of each layer and its name."""
        boxes = [] if self.box_predictor.agnostic else [(self.box_predictor, "bbox_pred")]
        masks = [(self.mask_predictor, "mask_fcn_logits")] if self.has_mask() else []
        return [(self.box_predictor, "cls_score"), *boxes, *masks]


class InstanceDecoder(nn.Module):
    """A pyramid, proposals on it, and heads for them; Mask R-CNN unless `make_heads` says more.

    Args:
        pyramid: What makes levels of an encoder's maps.
        width: Channels of a level.
        num_classes: Classes, without the background.
        masks: Whether instances have masks too.
        proposals: Most proposals of an image in evaluation; twice as many in training.
        samples: Those of them that train the heads.
        score_threshold: Least score of a detection.
        nms_threshold: IoU from which on the lower of two detections of a class is dropped.
        detections: Most detections of an image.
    """

    roi_heads: Any

    def __init__(
        self,
        pyramid: FeaturePyramid | SimplePyramid,
        width: int,
        num_classes: int,
        *,
        masks: bool,
        proposals: int,
        samples: int,
        score_threshold: float,
        nms_threshold: float,
        detections: int,
    ) -> None:
        super().__init__()
        self.pyramid = pyramid
        self.proposals, self.samples, self.detections = proposals, samples, detections
        reductions = [*pyramid.reductions]
        while reductions[-1] < COARSEST or len(reductions) == len(pyramid.reductions):
            reductions.append(2 * reductions[-1])
        anchors = AnchorGenerator(
            tuple((ANCHOR * each,) for each in reductions), (RATIOS,) * len(reductions)
        )
        most = {"training": 2 * proposals, "testing": proposals}
        self.rpn = RegionProposalNetwork(
            anchors, ProposalHead(width, len(RATIOS)), 0.7, 0.3, 256, 0.5, most, dict(most), 0.7
        )
        pools = tuple(LevelRoIAlign(pyramid.reductions, grid) for grid in (BOX_GRID, MASK_GRID))
        self.roi_heads = self.make_heads(
            pools,
            width,
            num_classes,
            masks=masks,
            samples=samples,
            score_threshold=score_threshold,
            nms_threshold=nms_threshold,
            detections=detections,
        )

    @abstractmethod
    def make_heads(self, *args: Any, **options: Any) -> nn.Module:
        """Make the heads, which take what `Heads` takes."""

    @property
    @abstractmethod
    def stages(self) -> list[Heads]:
        """The heads, one after another."""

    def forward(
        self,
        features: Maps,
        images: Tensor,
        sizes: Sizes,
        targets: Sequence[Instances] | None = None,
    ) -> list[Instances] | Losses:
        """Return the losses in training, else the detections of each image.

        Args:
            features: Levels of the pyramid, see `levels`.
            images: The padded batch that they are of.
            sizes: Height and width of each image without the padding, pixels.
            targets: The instances of each image, in training.
        """
        if not has_numbers(images):
            return self._outline(features, len(images))
        boxes, losses = self.rpn(ImageList(images, sizes), features, targets)
        if self.training:
            boxes = [_or_whole(each, size) for each, size in zip(boxes, sizes, strict=True)]
        found: list[Instances]
        found, more = self.roi_heads(features, boxes, sizes, targets)
        if self.training:
            return {**losses, **more}
        for each in found:
            if "masks" in each:
                each["masks"] = each["masks"].squeeze(1)
        return found

    def levels(self, maps: Sequence[Tensor]) -> Maps:
        """Return the pyramid of an encoder's maps, in full precision."""
        return {name: full_precision(each) for name, each in self.pyramid(maps).items()}

    def _outline(self, features: Maps, images: int) -> list[Instances] | Losses:
        """Compute what numbers would decide at its most: all proposals, detections and samples."""
        found = [*self.rpn.head([*features.values()])]
        boxes, masks = self.proposals, self.detections
        if self.training:
            boxes, masks = self.samples, int(POSITIVE * self.samples)
        outputs = [*found[0], *found[1]]
        for stage in self.stages:
            outputs += stage.outline(features, boxes * images, masks * images)
        if self.training:
            return {"loss": torch.stack([each.square().mean() for each in outputs]).sum()}
        empty = outputs[-1].new_zeros
        shapes = {"boxes": (masks, 4), "scores": (masks,)}
        if self.stages[0].has_mask():
            shapes["masks"] = (masks, 2 * MASK_GRID, 2 * MASK_GRID)
        return [
            {name: empty(shape) for name, shape in shapes.items()}
            | {"labels": empty(masks, dtype=torch.int64)}
            for _ in range(images)
        ]


class MaskRCNNDecoder(InstanceDecoder):
    """The decoder of Mask R-CNN."""

    def make_heads(self, *args: Any, **options: Any) -> Heads:
        """Make heads with a box for each class."""
        return Heads(*args, **options)

    @property
    def stages(self) -> list[Heads]:
        """The only heads."""
        return [self.roi_heads]


def _or_whole(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return an image's proposals, or the whole image if there are none: a mean needs one."""
    return boxes if len(boxes) else boxes.new_tensor([[0, 0, size[1], size[0]]])
