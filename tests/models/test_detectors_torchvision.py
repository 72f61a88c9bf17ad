# SPDX-License-Identifier: Apache-2.0
"""With the same weights, our Mask R-CNN on a ResNet-50 is torchvision's: losses and detections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import maskrcnn_resnet50_fpn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from keymix.models import create_model
from tolerances import close

CLASSES = 3
NAMES = {
    "backbone.body.": "encoder.model.",
    "backbone.fpn.": "decoder.pyramid.",
    "rpn.": "decoder.rpn.",
    "roi_heads.": "decoder.roi_heads.",
}
"""What names of torchvision's begin with, and ours."""


def ours_named(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Torchvision's weights by our names."""
    found = {}
    for name, tensor in state.items():
        start = next(each for each in NAMES if name.startswith(each))
        found[NAMES[start] + name.removeprefix(start)] = tensor
    return found


def drawn_norms(model: nn.Module) -> None:
    """Give BatchNorms statistics, scales and shifts that are not those of new ones."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
            with torch.no_grad():
                norm.weight.uniform_(0.5, 1.0)
                norm.bias.normal_(std=0.1)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Ours and torchvision's, with the same weights; torchvision's prepares no images.

    In double precision, in which no rounding changes which boxes overlap too much.
    """
    torch.manual_seed(0)
    theirs: Any = maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=CLASSES + 1,
        min_size=1,  # shorter sides stay as they are
        max_size=10**6,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        box_score_thresh=0.05,
        box_nms_thresh=0.1,  # leaves room for every class
        rpn_pre_nms_top_n_train=200,  # few: double precision is slow
        rpn_post_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_test=100,
        box_batch_size_per_image=32,
        box_detections_per_img=24,
    )
    theirs.transform.resize = lambda image, target: (image, target)
    drawn_norms(theirs)
    with torch.no_grad():  # some proposals shall be detections
        theirs.roi_heads.box_predictor.cls_score.weight.mul_(0.2)
        theirs.roi_heads.box_predictor.bbox_pred.weight.mul_(4)
        theirs.rpn.head.bbox_pred.weight.mul_(4)
    few = {"proposals": 100, "samples": 32, "detections": 24}
    ours = create_model(
        "mask_rcnn", num_classes=CLASSES, score_threshold=0.05, nms_threshold=0.1, **few
    )
    state = ours_named(theirs.state_dict())
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not missing
    assert all(name.endswith("num_batches_tracked") for name in unexpected)
    return ours.double(), theirs.double()


def batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of unequal, odd sizes, one without an instance, and their instances."""
    torch.manual_seed(1)
    sizes = ((101, 87), (70, 130), (65, 65))
    images = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    boxes = [
        torch.tensor([[20.0, 30, 60, 90], [30, 10, 45, 30], [5, 50, 80, 95]]),
        torch.tensor([[10.0, 10, 120, 60]]),
        torch.zeros(0, 4),
    ]
    boxes = [each.double() for each in boxes]
    targets = []
    for image, corners in zip(images, boxes, strict=True):
        masks = torch.zeros(len(corners), *image.shape[1:], dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, corners.int().tolist(), strict=True):
            mask[top:bottom, left : (left + right) // 2] = 1
        labels = torch.arange(len(corners)) % CLASSES + 1
        targets.append({"boxes": corners, "labels": labels, "masks": masks})
    return images, targets


@pytest.mark.slow
def test_losses_and_gradients_are_torchvisions(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    images, targets = batch()
    found = []
    for model in pair:
        model.train()
        theirs.backbone.eval()  # BatchNorms as ours, which are frozen
        torch.manual_seed(2)
        found.append(model(images, targets))
        torch.stack([*found[-1].values()]).sum().backward()
    assert found[0].keys() == found[1].keys()
    for name, loss in found[1].items():
        assert loss > 0
        close(found[0][name], loss)
    wanted = ours_named({n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
    for name, parameter in ours.named_parameters():
        close(parameter.grad, wanted[name])


@pytest.mark.slow
def test_detections_are_torchvisions(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    images, _ = batch()
    with torch.no_grad():
        wanted, found = theirs.eval()(images), ours.eval()(images)
    assert sum(len(each["boxes"]) for each in wanted) > 10
    assert {int(label) for each in wanted for label in each["labels"]} == {1, 2, 3}
    for image, mine, other in zip(images, found, wanted, strict=True):
        size = (image.shape[1], image.shape[2])
        assert mine["size"].tolist() == [*size]
        assert mine["labels"].tolist() == other["labels"].tolist()
        close(mine["boxes"], other["boxes"])
        close(mine["scores"], other["scores"])
        pasted = paste_masks_in_image(mine["masks"][:, None], mine["boxes"], size)
        close(pasted, other["masks"])
