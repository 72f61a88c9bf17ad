# SPDX-License-Identifier: Apache-2.0
"""Losses of masks against sums written out pixel by pixel, ignored pixels and all."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from segmentation_models_pytorch.losses import DiceLoss, FocalLoss, TverskyLoss
from torch import Tensor

from keymix.tasks.segmentation.losses import (
    boundary_loss,
    mean_loss,
    overlap_loss,
    pixel_losses,
)
from keymix.tasks.segmentation.scoring import predicted_masks


def exclusive() -> tuple[Tensor, Tensor]:
    """Return logits of three classes and targets with two ignored pixels, odd sizes."""
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 3, 5, dtype=torch.float64)
    targets = torch.randint(0, 3, (2, 3, 5))
    targets[0, 1, 2] = targets[1, 0, 0] = 255
    return logits, targets


def several() -> tuple[Tensor, Tensor]:
    """Return logits and targets where a pixel has any number of classes."""
    logits, _ = exclusive()
    targets = torch.randint(0, 2, logits.shape)
    targets[0, 1, 2, 2] = 255
    return logits, targets


def test_the_loss_of_exclusive_masks_is_the_mean_over_pixels_that_count() -> None:
    logits, targets = exclusive()
    losses = []
    for b in range(2):
        for y in range(3):
            for x in range(5):
                if targets[b, y, x] != 255:
                    shares = [math.exp(v) for v in logits[b, :, y, x].tolist()]
                    losses.append(-math.log(shares[int(targets[b, y, x])] / sum(shares)))
    assert len(losses) == 28
    loss = mean_loss(logits, targets, multilabel=False)
    assert float(loss) == pytest.approx(sum(losses) / 28, rel=1e-12)


def test_the_loss_of_masks_of_several_classes_is_binary() -> None:
    logits, targets = several()
    losses = []
    for place in torch.cartesian_prod(*(torch.arange(n) for n in targets.shape)).tolist():
        value, wanted = float(logits[tuple(place)]), int(targets[tuple(place)])
        if wanted != 255:
            share = 1 / (1 + math.exp(-value))
            losses.append(-math.log(share if wanted else 1 - share))
    assert len(losses) == targets.numel() - 1
    loss = mean_loss(logits, targets, multilabel=True)
    assert float(loss) == pytest.approx(sum(losses) / len(losses), rel=1e-12)


@pytest.mark.parametrize("multilabel", [False, True])
def test_soft_dice_is_the_formula_class_by_class(multilabel: bool) -> None:
    logits, targets = several() if multilabel else exclusive()
    shares = logits.sigmoid() if multilabel else logits.softmax(1)
    terms = []
    for k in range(3):
        wanted = targets[:, k] if multilabel else targets
        counts = wanted != 255
        true = (wanted == (1 if multilabel else k)) & counts
        p = shares[:, k][counts]
        both = float(p[true[counts]].sum())
        terms.append(1 - (2 * both + 1) / (float(p.sum()) + int(true.sum()) + 1))
    loss = overlap_loss(logits, targets, multilabel=multilabel, classes=[0, 1, 2])
    assert float(loss) == pytest.approx(sum(terms) / 3, rel=1e-12)
    some = overlap_loss(logits, targets, multilabel=multilabel, classes=[1, 2])
    assert float(some) == pytest.approx(sum(terms[1:]) / 2, rel=1e-12)


MODES = {False: "multiclass", True: "multilabel"}


@pytest.mark.parametrize("tversky", [(0.5, 0.5), (0.3, 0.7)])
@pytest.mark.parametrize("multilabel", [False, True])
def test_overlap_is_that_of_segmentation_models_pytorch(
    multilabel: bool, tversky: tuple[float, float]
) -> None:
    logits, targets = several() if multilabel else exclusive()
    ours = overlap_loss(logits, targets, multilabel=multilabel, classes=[0, 1, 2], tversky=tversky)
    alpha, beta = tversky
    more = {"smooth": 0.5, "ignore_index": 255, "alpha": alpha, "beta": beta}
    theirs = TverskyLoss(MODES[multilabel], **more)(logits, targets)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-12)
    if tversky == (0.5, 0.5):
        dice = DiceLoss(MODES[multilabel], smooth=0.5, ignore_index=255)(logits, targets)
        assert float(ours) == pytest.approx(float(dice), rel=1e-12)


def test_the_focal_loss_is_that_of_segmentation_models_pytorch() -> None:
    logits, targets = several()
    ours = mean_loss(logits, targets, multilabel=True, focal=2.0)
    counted = targets != 255
    theirs = FocalLoss("binary", gamma=2.0)(logits[counted], targets[counted])
    assert float(ours) == pytest.approx(float(theirs), rel=1e-12)
    logits, targets = exclusive()
    shares = logits.softmax(1).gather(1, (targets * (targets != 255))[:, None])[:, 0]
    wanted = (-((1 - shares) ** 2) * shares.log())[targets != 255].mean()
    ours = mean_loss(logits, targets, multilabel=False, focal=2.0)
    assert float(ours) == pytest.approx(float(wanted), rel=1e-12)


def test_weights_of_classes_are_those_of_pytorch() -> None:
    weights = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    logits, targets = exclusive()
    wanted = F.cross_entropy(logits, targets, weight=weights, ignore_index=255)
    ours = mean_loss(logits, targets, multilabel=False, weights=weights)
    assert float(ours) == pytest.approx(float(wanted), rel=1e-12)
    logits, targets = several()
    targets[targets == 255] = 0
    pos = weights[:, None, None]
    wanted = F.binary_cross_entropy_with_logits(
        logits, targets.double(), pos_weight=pos, reduction="sum"
    )
    share = torch.where(targets == 1, pos, 1.0).sum()
    ours = mean_loss(logits, targets, multilabel=True, weights=weights)
    assert float(ours) == pytest.approx(float(wanted / share), rel=1e-12)


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_boundary_loss_is_the_mean_distance_pixel_by_pixel(multilabel: bool) -> None:
    logits, targets = several() if multilabel else exclusive()
    targets[1] = 0  # of the second image no class has an outline
    shares = logits.sigmoid() if multilabel else logits.softmax(1)
    total, pixels = 0.0, 0
    for b in range(2):
        for k in (1, 2):
            mask = targets[b, k] if multilabel else targets[b]
            true = mask == (1 if multilabel else k)
            for y, x in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape)).tolist():
                if mask[y, x] == 255:
                    continue
                pixels += 1
                other = (true != true[y, x]).nonzero().double()
                if len(other) and len(other) < true.numel():
                    far = float((other - torch.tensor([y, x])).norm(dim=1).min()) - 0.5
                    total += float(shares[b, k, y, x]) * (-far if true[y, x] else far)
    loss = boundary_loss(logits, targets, multilabel=multilabel, classes=[1, 2])
    assert float(loss) == pytest.approx(total / pixels, rel=1e-12)
    assert total != 0


@pytest.mark.parametrize("multilabel", [False, True])
def test_ignored_pixels_give_no_gradient(multilabel: bool) -> None:
    logits, targets = several() if multilabel else exclusive()
    options = {"focal": 2.0, "weights": torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)}
    every = partial(overlap_loss, classes=[0, 1, 2])
    away = partial(boundary_loss, classes=[0, 1, 2])
    for loss in (mean_loss, partial(mean_loss, **options), every, away):
        given = logits.clone().requires_grad_()
        loss(given, targets, multilabel=multilabel).backward()
        assert given.grad is not None
        ignored = targets == 255 if multilabel else (targets == 255)[:, None].expand_as(given)
        assert given.grad[ignored].abs().max() == 0
        assert given.grad[~ignored].abs().max() > 0


def test_a_batch_of_ignored_pixels_alone_costs_nothing() -> None:
    logits, targets = exclusive()
    targets = torch.full_like(targets, 255)
    for options in ({}, {"focal": 2.0}, {"weights": torch.zeros(3, dtype=torch.float64)}):
        assert float(mean_loss(logits, targets, multilabel=False, **options)) == 0.0
    losses, counted = pixel_losses(logits, targets, multilabel=False)
    assert not counted.any()
    assert not losses.any()


def test_masks_are_the_likeliest_class_or_all_above_one_half() -> None:
    logits = torch.tensor([[[[0.2, -1.0]], [[0.1, -0.5]], [[-3.0, -2.0]]]])
    assert predicted_masks(logits, multilabel=False).tolist() == [[[0, 1]]]
    assert predicted_masks(logits, multilabel=True).tolist() == [[[[1, 0]], [[1, 0]], [[0, 0]]]]
