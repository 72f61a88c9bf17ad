# SPDX-License-Identifier: Apache-2.0
"""Losses and overlap of predicted masks: cross entropy of pixels, soft Dice, pixels in common.

The paper on KV attention in SETR (Hwa et al. 2025, https://doi.org/10.1007/978-3-658-47422-5_71,
Sec. 2.3) names no loss; cross entropy is that of SETR (https://arxiv.org/abs/2012.15840).
`keymix.analysis.overlap` defines the scores: pixels of all images of a split are counted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from keymix.analysis import overlap
from keymix.data.kinds import IGNORE
from keymix.train import ranks
from keymix.train.scoring import Metrics, ValidationScores

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


def pixel_losses(logits: Tensor, targets: Tensor, *, multilabel: bool) -> tuple[Tensor, Tensor]:
    """Cross entropy of each pixel, 0 where it is ignored, and which pixels count.

    With ``multilabel`` each class is answered for itself, by binary cross entropy.

    Shape: logits ``[B, K, H, W]``, targets ``[B, H, W]`` of class numbers, or ``[B, K, H, W]`` of 0
    and 1 where ``multilabel`` -> losses and booleans, both like targets.
    """
    counted = targets != IGNORE
    if not multilabel:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none"), counted
    wanted = (targets * counted).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * counted, counted


def mean_loss(logits: Tensor, targets: Tensor, *, multilabel: bool) -> Tensor:
    """Mean cross entropy over the pixels that count; 0 where none does.

    Of a batch over several ranks the mean of what each returns is that of the batch.
    """
    losses, counted = pixel_losses(logits, targets, multilabel=multilabel)
    pixels = ranks.mean(counted.sum().to(losses.dtype))
    return losses.sum() / pixels.clamp(min=1 / ranks.size())


def loss_of_each(logits: Tensor, targets: Tensor, *, multilabel: bool) -> Tensor:
    """Mean cross entropy of each image over its pixels that count, ``[B]``; 0 where none does."""
    losses, counted = pixel_losses(logits, targets, multilabel=multilabel)
    return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def soft_dice_loss(
    logits: Tensor, targets: Tensor, *, multilabel: bool, classes: Sequence[int]
) -> Tensor:
    r"""Mean over classes of :math:`1 - (2 \sum p y + 1) / (\sum p + \sum y + 1)`, over the batch.

    Milletari et al. 2016, V-Net, https://arxiv.org/abs/1606.04797, Sec. 3, with the plain sums in
    the denominator, 1 added above and below, and p the softmax (sigmoid where ``multilabel``). Of
    a class that the batch has not there remains :math:`1 - 1 / (\sum p + 1)`: nearly 1 in value
    until p is small in all pixels together, and :math:`1 / (\sum p + 1)^2` in gradient by p, which
    is little as long as that sum is large. Logits and targets are those of `pixel_losses`; ignored
    pixels count nowhere, and the mean is over ``classes``, all but the background.
    """
    counted = targets != IGNORE
    if multilabel:
        shares = logits.sigmoid() * counted
        wanted = (targets * counted).to(shares.dtype)
    else:
        shares = logits.softmax(1) * counted[:, None]
        planes = F.one_hot(targets * counted, logits.shape[1]).movedim(-1, 1)
        wanted = (planes * counted[:, None]).to(shares.dtype)
    shares, wanted = shares[:, list(classes)], wanted[:, list(classes)]
    sums = (shares * wanted).sum((0, 2, 3)), (shares + wanted).sum((0, 2, 3))
    both, all_ = ranks.summed(torch.stack(sums)).unbind()
    return (1 - (2 * both + 1) / (all_ + 1)).mean()


def predicted_masks(logits: Tensor, *, multilabel: bool) -> Tensor:
    """Say which class, or classes, each pixel has: the likeliest, or those above one half.

    Shape: ``[B, K, H, W]`` -> int64 ``[B, H, W]``; 0 and 1 ``[B, K, H, W]`` where ``multilabel``.
    """
    return (logits > 0).long() if multilabel else logits.argmax(1)


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

    def update(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Take in a batch: logits ``[B, K, H, W]``, targets as a loader gives them.

        Gives common, predicted and true pixels of each image and class, int64 ``[B, K, 3]``.
        """
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
