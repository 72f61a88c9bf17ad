# SPDX-License-Identifier: Apache-2.0
"""Loss and accuracy over a split, in validation and in test alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from keymix.data.specs import named
from keymix.data.streams import IntArray
from keymix.train.one_answer import warn_of_one_answer
from keymix.train.recipe import ModelConfig
from keymix.train.record import SplitScores

TOP5_FROM = 6  # classes; with five or fewer, top-5 is always right and told as null

Metrics = dict[str, float | None]


class ImageBatch(Protocol):
    """What a loader yields: normalised images [B, C, H, W], targets [B], sample indices [B]."""

    @property
    def images(self) -> Tensor: ...  # noqa: D102

    @property
    def targets(self) -> Tensor: ...  # noqa: D102

    @property
    def index(self) -> Tensor: ...  # noqa: D102


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


class Scores(nn.Module):
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


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A model's answers on a split, on the CPU, in the order of the loader.

    Args:
        metrics: ``loss``, ``top1``, ``top5``; fractions, or None.
        index: Sample indices [N].
        targets: True classes [N].
        predicted: Most likely classes [N].
        top5: Whether the true class is among the five most likely [N].
    """

    metrics: Metrics
    index: Tensor
    targets: Tensor
    predicted: Tensor
    top5: Tensor

    @property
    def record(self) -> SplitScores:
        """The scores, as records keep them."""
        return SplitScores(scores=self.metrics)

    def shared(self) -> dict[str, IntArray]:
        """The arrays that are the same whatever weights answered."""
        return {"index": self.index.numpy(), "target": self.targets.numpy()}

    def arrays(self, which: str) -> dict[str, np.ndarray[Any, Any]]:
        """The answers with the weights of the ``last`` or ``best`` epoch."""
        return {f"{which}_pred": self.predicted.numpy(), f"{which}_top5": self.top5.numpy()}

    def warn(self, model: ModelConfig, classes: Sequence[str], split: str, *, events: bool) -> None:
        """Warn where (nearly) all images got the same answer.

        Args:
            model: What was trained.
            classes: Names of the classes.
            split: What the images are.
            events: Whether they are recordings of events.
        """
        answers = self.predicted.tolist(), self.targets.tolist()
        items = named("images", events=events)
        warn_of_one_answer(model, classes, split, *answers, self.metrics["loss"], items=items)


def effective_precision(precision: str, device: torch.device) -> str:
    """Return ``32``, ``bf16`` or ``16``: what a recipe's precision means on a device.

    Args:
        precision: As in a recipe; ``auto`` is bfloat16 on CUDA, else 32 bits.
        device: Where to compute.
    """
    if precision == "auto":
        return "bf16" if device.type == "cuda" else "32"
    return precision


def autocast(device: torch.device, precision: str, *, cache: bool = True) -> torch.autocast:
    """The context that a recipe's precision means on a device, see `effective_precision`.

    Args:
        device: Where to compute.
        precision: As in a recipe.
        cache: Convert a weight that is used twice once; its gradients are then summed in the low
            precision.
    """
    bits = effective_precision(precision, device)
    dtype = torch.float16 if bits == "16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=bits != "32", cache_enabled=cache)


@torch.inference_mode()
def score(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    *,
    num_classes: int,
    device: torch.device,
    precision: str = "32",
) -> Scored:
    """Answer every image of a split and score the answers.

    Args:
        model: A classifier; evaluated as it stands, in eval mode.
        batches: The split, on the device.
        num_classes: Classes of the model.
        device: Where to compute.
        precision: As in a recipe.
    """
    model = model.to(device).eval()
    scores = Scores(num_classes).to(device)
    parts: list[tuple[Tensor, ...]] = []
    for batch in batches:
        targets = batch.targets
        with autocast(device, precision):
            logits = model(batch.images).float()
        scores.update(logits, targets)
        best = logits.topk(min(5, num_classes), dim=1).indices
        hit = (best == targets[:, None]).any(1)
        parts.append((batch.index.cpu(), targets.cpu(), best[:, 0].cpu(), hit.cpu()))
    index, all_targets, predicted, top5 = (torch.cat(part) for part in zip(*parts, strict=True))
    return Scored(
        metrics=scores.told(), index=index, targets=all_targets, predicted=predicted, top5=top5
    )
