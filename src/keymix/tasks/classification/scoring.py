# SPDX-License-Identifier: Apache-2.0
"""Loss and accuracy of classes, summed up over an evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from keymix.train.scoring import Metrics, ValidationScores

TOP5_FROM = 6  # classes; with five or fewer, top-5 is always right and recorded as null


class Hits(Metric):
    """Counts images and those whose class is among the k most likely, as whole numbers.

    Args:
        k: How many classes may be right.
    """

    right: Tensor
    images: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        for name in ("right", "images"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch: logits [B, classes], targets [B]."""
        best = logits.argmax(1, keepdim=True) if self.k == 1 else logits.topk(self.k, dim=1).indices
        self.right += (best == targets[:, None]).sum()
        self.images += len(targets)

    def compute(self) -> Tensor:
        """How many were right, of how many images [2]."""
        return torch.stack([self.right, self.images])


class Scores(ValidationScores):
    """Mean loss and top-1 and top-5 accuracy over an evaluation, correct under distribution.

    Accuracies are quotients of whole numbers: 21 of 200 is 0.105 and not its float32.

    Args:
        num_classes: Classes of the model; top-5 is told from six up.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanMetric()
        self.top1 = Hits(1)
        self.top5 = Hits(5) if num_classes >= TOP5_FROM else None

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch: logits [B, classes], targets [B]."""
        logits = logits.float()
        self.loss.update(F.cross_entropy(logits, targets), len(targets))
        self.top1.update(logits, targets)
        if self.top5 is not None:
            self.top5.update(logits, targets)

    def told(self) -> Metrics:
        """The scores since the last call: ``loss``, ``top1``, ``top5`` as fractions or None."""
        scores: Metrics = {
            "loss": float(self.loss.compute()),
            "top1": _share(self.top1),
            "top5": None if self.top5 is None else _share(self.top5),
        }
        for metric in (self.loss, self.top1, self.top5):
            if metric is not None:
                metric.reset()
        return scores


def _share(hits: Hits) -> float:
    right, images = hits.compute().tolist()
    return float(right / images)
