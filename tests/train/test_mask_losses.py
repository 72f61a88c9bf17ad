# SPDX-License-Identifier: Apache-2.0
"""Losses of masks against sums written out pixel by pixel, ignored pixels and all."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from keymix.tasks.segmentation.scoring import (
    mean_loss,
    pixel_losses,
    predicted_masks,
    soft_dice_loss,
)


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
    loss = soft_dice_loss(logits, targets, multilabel=multilabel, classes=[0, 1, 2])
    assert float(loss) == pytest.approx(sum(terms) / 3, rel=1e-12)
    some = soft_dice_loss(logits, targets, multilabel=multilabel, classes=[1, 2])
    assert float(some) == pytest.approx(sum(terms[1:]) / 2, rel=1e-12)


@pytest.mark.parametrize("multilabel", [False, True])
def test_ignored_pixels_give_no_gradient(multilabel: bool) -> None:
    logits, targets = several() if multilabel else exclusive()
    for loss in (mean_loss, partial(soft_dice_loss, classes=[0, 1, 2])):
        given = logits.clone().requires_grad_()
        loss(given, targets, multilabel=multilabel).backward()
        assert given.grad is not None
        ignored = targets == 255 if multilabel else (targets == 255)[:, None].expand_as(given)
        assert given.grad[ignored].abs().max() == 0
        assert given.grad[~ignored].abs().max() > 0


def test_a_batch_of_ignored_pixels_alone_costs_nothing() -> None:
    logits, targets = exclusive()
    targets = torch.full_like(targets, 255)
    assert float(mean_loss(logits, targets, multilabel=False)) == 0.0
    losses, counted = pixel_losses(logits, targets, multilabel=False)
    assert not counted.any()
    assert not losses.any()


def test_masks_are_the_likeliest_class_or_all_above_one_half() -> None:
    logits = torch.tensor([[[[0.2, -1.0]], [[0.1, -0.5]], [[-3.0, -2.0]]]])
    assert predicted_masks(logits, multilabel=False).tolist() == [[[0, 1]]]
    assert predicted_masks(logits, multilabel=True).tolist() == [[[[1, 0]], [[1, 0]], [[0, 0]]]]
