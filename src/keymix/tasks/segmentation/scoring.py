# SPDX-License-Identifier: Apache-2.0
"""Predicted masks and their overlap with the true ones over a split.

`keymix.analysis.overlap` defines the scores: pixels of all images of a split are counted together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.analysis import overlap
from keymix.data.kinds import IGNORE
from keymix.tasks.segmentation.losses import pixel_losses
from keymix.train.scoring import Metrics, ValidationScores

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

BINS = 15


def predicted_masks(logits: Tensor, *, multilabel: bool) -> Tensor:
    """Say which class, or classes, each pixel has: the likeliest, or those above one half.

    Shape: ``[B, K, H, W]`` -> int64 ``[B, H, W]``; 0 and 1 ``[B, K, H, W]`` where ``multilabel``.
    """
    return (logits > 0).long() if multilabel else logits.argmax(1)


def confidence_bins(
    logits: Tensor, targets: Tensor, *, multilabel: bool, classes: Sequence[int]
) -> Tensor:
    """Count an image's pixels by how sure their class is, from 0 to 1 in `BINS` equal steps.

    Of multi-label masks each of the classes, found or not found, counts for itself. What is NaN
    counts nowhere.

    Shape: ``[K, H, W]`` and ``[H, W]``, or ``[K, H, W]`` twice -> float64 ``[BINS, 3]``: pixels,
    the sum of their probabilities, and how many are right.
    """
    if multilabel:
        positive, targets = logits[list(classes)].sigmoid(), targets[list(classes)]
        sure = torch.maximum(positive, 1 - positive)
        found = (positive > 0.5).long()
    else:
        sure, found = logits.softmax(0).max(0)
    values = torch.stack([torch.ones_like(sure), sure, (found == targets).float()], -1)
    counted = (targets != IGNORE) & sure.isfinite()
    at = (sure[counted] * BINS).long().clamp(max=BINS - 1)
    bins = torch.zeros(BINS, 3, dtype=torch.float64, device=logits.device)
    return bins.index_add_(0, at, values[counted].double())


def calibration_error(bins: NDArray[np.float64]) -> float:
    """Return the expected calibration error of `confidence_bins`, or of their sum; NaN of none.

    The mean distance over pixels of a bin's share of right ones from its mean probability
    (https://arxiv.org/abs/1706.04599, Eq. 5).
    """
    total = bins[..., 0].sum()
    return float(np.abs(bins[..., 2] - bins[..., 1]).sum() / total) if total else math.nan


def overlap_scores(counts: NDArray[np.int64], scored: Sequence[int]) -> dict[str, float]:
    """Score the pixels of each class ``[K, 3]``, as fractions; means over those that count."""
    return {
        "jaccard": float(overlap.mean_jaccard(counts, scored)),
        "weighted_jaccard": float(overlap.weighted_jaccard(counts, scored)),
        "dice": float(overlap.mean_dice(counts, scored)),
    }


class MaskScores(ValidationScores):
    """Loss and overlap over an evaluation, from whole numbers."""

    loss: Tensor
    pixels: Tensor  # that count
    counts: Tensor  # common, predicted and true pixels of each class [K, 3]

    def __init__(self, data: ImageData) -> None:
        super().__init__(
            loss=torch.zeros((), dtype=torch.float64),
            pixels=torch.zeros((), dtype=torch.int64),
            counts=torch.zeros((len(data.classes), 3), dtype=torch.int64),
        )
        assert data.masks is not None
        self.multilabel, self.num_classes = data.masks.multilabel, len(data.classes)
        self.scored = list(data.record().scored_classes)

    def update(self, logits: Tensor | list[Tensor], targets: Any) -> Tensor:
        """Take in a batch: logits ``[B, K, H, W]``, targets as a loader gives them; or lists.

        Gives common, predicted and true pixels of each image and class, int64 ``[B, K, 3]``.
        """
        if isinstance(logits, list):
            pairs = zip(logits, targets, strict=True)
            return torch.cat([self.update(each[None], true[None]) for each, true in pairs])
        logits = logits.float()
        losses, counted = pixel_losses(logits, targets, multilabel=self.multilabel)
        found = predicted_masks(logits, multilabel=self.multilabel)
        counts = overlap.count_overlap(
            found, targets, num_classes=self.num_classes, multilabel=self.multilabel
        )
        self.loss += losses.double().sum()
        self.pixels += counted.sum()
        self.counts += counts.sum(0)
        return counts

    def metrics(self) -> Metrics:
        """The scores since the last call, as fractions: ``loss``, and those of the task."""
        sums = self.taken()
        loss = sums["loss"] / sums["pixels"].clamp(min=1)
        return {"loss": float(loss), **overlap_scores(sums["counts"].cpu().numpy(), self.scored)}
