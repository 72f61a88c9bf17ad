# SPDX-License-Identifier: Apache-2.0
"""Loss and overlap of predicted masks, summed up over an evaluation.

`keymix.analysis.overlap` defines the scores: pixels of all images of a split are counted together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchmetrics import Metric

from keymix.analysis import overlap
from keymix.data.kinds import IGNORE
from keymix.tasks.segmentation.losses import pixel_losses
from keymix.train.scoring import Metrics, ValidationScores

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


def predicted_masks(logits: Tensor, *, multilabel: bool) -> Tensor:
    """Say which class, or classes, each pixel has: the likeliest, or those above one half.

    Shape: ``[B, K, H, W]`` -> int64 ``[B, H, W]``; 0 and 1 ``[B, K, H, W]`` where ``multilabel``.
    """
    return (logits > 0).long() if multilabel else logits.argmax(1)


def count_overlap(found: Tensor, targets: Tensor, *, num_classes: int, multilabel: bool) -> Tensor:
    """Count as `keymix.analysis.overlap.overlap_counts` does, on the device of the masks.

    Args:
        found: What `predicted_masks` gives.
        targets: The truth, likewise; 255 counts nowhere.
        num_classes: Classes K.
        multilabel: Whether a pixel may have several classes.

    Shape: ``[B, H, W]`` twice, or ``[B, K, H, W]`` twice if ``multilabel`` -> int64 ``[B, K, 3]``:
    pixels that both have, that are predicted, that are true.
    """
    counted = targets != IGNORE
    if multilabel:
        ours, theirs = (found == 1) & counted, (targets == 1) & counted
        return torch.stack([ours & theirs, ours, theirs], -1).sum((2, 3))
    images = len(targets)
    cells = images * num_classes**2
    image = torch.arange(images, device=targets.device)[:, None, None]
    cell = (image * num_classes + targets) * num_classes + found
    cell = torch.where(counted, cell, cells)  # one more cell, for what is ignored
    tally = torch.bincount(cell.flatten(), minlength=cells + 1)[:cells]
    confusion = tally.view(images, num_classes, num_classes)
    both = confusion.diagonal(dim1=1, dim2=2)
    return torch.stack([both, confusion.sum(1), confusion.sum(2)], -1)


class _Sums(Metric):
    """Sums over an evaluation: of losses, of pixels that count, and of each class's pixels."""

    loss: Tensor
    pixels: Tensor
    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        states = {"loss": torch.zeros((), dtype=torch.float64)}
        states["pixels"] = torch.zeros((), dtype=torch.int64)
        states["counts"] = torch.zeros((num_classes, 3), dtype=torch.int64)
        for name, zero in states.items():
            self.add_state(name, zero, dist_reduce_fx="sum")

    def update(self, losses: Tensor, counted: Tensor, counts: Tensor) -> None:
        """Take in a batch: what `pixel_losses` gives, and `count_overlap`."""
        self.loss += losses.double().sum()
        self.pixels += counted.sum()
        self.counts += counts.sum(0)

    def compute(self) -> tuple[Tensor, Tensor]:
        """The mean loss, and the pixels of each class ``[K, 3]``."""
        return self.loss / self.pixels.clamp(min=1), self.counts


class MaskScores(ValidationScores):
    """Loss and overlap over an evaluation, from whole numbers, correct under distribution.

    Args:
        data: The data set, for its classes.
    """

    def __init__(self, data: ImageData) -> None:
        super().__init__()
        assert data.masks is not None
        self.multilabel, self.num_classes = data.masks.multilabel, len(data.classes)
        self.scored = list(data.record().scored_classes)
        self.sums = _Sums(self.num_classes)

    def update(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Take in a batch: logits ``[B, K, H, W]``, targets as a loader gives them.

        Returns:
            Common, predicted and true pixels of each image and class, int64 ``[B, K, 3]``.
        """
        logits = logits.float()
        losses, counted = pixel_losses(logits, targets, multilabel=self.multilabel)
        found = predicted_masks(logits, multilabel=self.multilabel)
        counts = count_overlap(
            found, targets, num_classes=self.num_classes, multilabel=self.multilabel
        )
        self.sums.update(losses, counted, counts)
        return counts

    def compute(self) -> Metrics:
        """The scores so far, as fractions: ``loss, jaccard, weighted_jaccard, dice``."""
        loss, pixels = self.sums.compute()
        counts = pixels.cpu().numpy()
        return {
            "loss": float(loss),
            "jaccard": float(overlap.mean_jaccard(counts, self.scored)),
            "weighted_jaccard": float(overlap.weighted_jaccard(counts, self.scored)),
            "dice": float(overlap.mean_dice(counts, self.scored)),
        }

    def told(self) -> Metrics:
        """The scores since the last call."""
        scores = self.compute()
        self.sums.reset()
        return scores
