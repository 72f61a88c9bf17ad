# SPDX-License-Identifier: Apache-2.0
"""Loss and overlap of predicted masks over a split, in validation and in test alike.

`keymix.analysis.overlap` defines the scores: pixels of all images of a split are counted together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import Metric

from keymix.analysis import overlap
from keymix.data.streams import IntArray
from keymix.data.tasks import IGNORE
from keymix.train.one_answer import warn_of_no_overlap
from keymix.train.record import ClassScores, SplitScores
from keymix.train.scoring import ImageBatch, Metrics, autocast

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split


def pixel_losses(logits: Tensor, targets: Tensor, *, multilabel: bool) -> tuple[Tensor, Tensor]:
    """Cross entropy of each pixel, 0 where it is ignored, and which pixels count.

    Args:
        logits: ``[B, K, H, W]``.
        targets: ``[B, H, W]`` class numbers; ``[B, K, H, W]`` of 0 and 1 where ``multilabel``.
        multilabel: Whether classes are answered each for itself (binary cross entropy).

    Shape: -> losses and booleans, both like targets.
    """
    counted = targets != IGNORE
    if not multilabel:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none"), counted
    wanted = (targets * counted).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * counted, counted


def mean_loss(logits: Tensor, targets: Tensor, *, multilabel: bool) -> Tensor:
    """Mean cross entropy over the pixels that count; 0 where none does."""
    losses, counted = pixel_losses(logits, targets, multilabel=multilabel)
    return losses.sum() / counted.sum().clamp(min=1)


def soft_dice_loss(
    logits: Tensor, targets: Tensor, *, multilabel: bool, classes: Sequence[int]
) -> Tensor:
    r"""Mean over classes of :math:`1 - (2 \sum p y + 1) / (\sum p + \sum y + 1)`, over the batch.

    Milletari et al. 2016, V-Net, https://arxiv.org/abs/1606.04797, Sec. 3, with the plain sums in
    the denominator, 1 added above and below, and p the softmax (sigmoid where ``multilabel``). Of
    a class that the batch has not there remains :math:`1 - 1 / (\sum p + 1)`: nearly 1 in value
    until p is small in all pixels together, and :math:`1 / (\sum p + 1)^2` in gradient by p, which
    is little as long as that sum is large.

    Args:
        logits: ``[B, K, H, W]``.
        targets: As in `pixel_losses`; ignored pixels count nowhere.
        multilabel: Whether classes are answered each for itself.
        classes: Those that count, all but the background.
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
    both, all_ = (shares * wanted).sum((0, 2, 3)), (shares + wanted).sum((0, 2, 3))
    return (1 - (2 * both + 1) / (all_ + 1)).mean()


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


class MaskScores(nn.Module):
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


@dataclass(frozen=True, kw_only=True)
class MaskScored:
    """A model's masks on a split, counted, in the order of the loader.

    Args:
        metrics: ``loss, jaccard, weighted_jaccard, dice``.
        index: Positions in the split ``[N]``.
        groups: Number of the case of each image ``[N]``.
        counts: Common, predicted and true pixels of each image and class, ``[N, K, 3]``.
        hausdorff: Distance of each image and class ``[N, K]``, NaN where there is none.
        unit: Of the distances: ``mm``, or ``px`` of the images as the model sees them.
        classes: Names of the classes.
        scored: Numbers of those over which means are taken.
    """

    metrics: Metrics
    index: IntArray
    groups: IntArray
    counts: IntArray
    hausdorff: NDArray[np.float64]
    unit: Literal["mm", "px"]
    classes: tuple[str, ...]
    scored: tuple[int, ...]

    @property
    def record(self) -> SplitScores:
        """The scores, distances, and each class for itself, as records keep them."""
        pooled = self.counts.sum(0)
        jaccard, dice = overlap.jaccard(pooled), overlap.dice(pooled)
        one_empty = (self.counts[..., 1] > 0) != (self.counts[..., 2] > 0)
        chosen = list(self.scored)
        return SplitScores(
            scores=self.metrics,
            hausdorff_mm=_mean(self.hausdorff[:, chosen]),
            hausdorff_missed=int(one_empty[:, chosen].sum()),
            hausdorff_unit=self.unit,
            true_pixels=int(pooled[chosen, 2].sum()),
            classes=tuple(
                ClassScores(
                    name=self.classes[k],
                    jaccard=_number(jaccard[k]),
                    dice=_number(dice[k]),
                    hausdorff_mm=_mean(self.hausdorff[:, k]),
                    missed=int(one_empty[:, k].sum()),
                )
                for k in chosen
            ),
        )

    def shared(self) -> dict[str, IntArray]:
        """The arrays that are the same whatever weights answered."""
        return {"index": self.index, "group": self.groups}

    def arrays(self, which: str) -> dict[str, np.ndarray[Any, Any]]:
        """The answers with the weights of the ``last`` or ``best`` epoch."""
        return {f"{which}_counts": self.counts, f"{which}_hausdorff": self.hausdorff}

    def warn(self, split: str) -> None:
        """Warn where nothing of the true masks is covered.

        Args:
            split: What the images are.
        """
        warn_of_no_overlap(split, len(self.index), self.record)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _mean(values: NDArray[np.float64]) -> float | None:
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None


@torch.inference_mode()
def score_masks(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    split: Split,
    data: ImageData,
    *,
    device: torch.device,
    precision: str = "32",
) -> MaskScored:
    """Answer every image of a split and score the masks, at the size the model sees.

    Args:
        model: A segmenter; evaluated as it stands, in eval mode.
        batches: The split, on the device.
        split: The split, for cases and spacings.
        data: The data set.
        device: Where to compute.
        precision: As in a recipe.
    """
    assert split.scans is not None
    assert data.masks is not None
    model = model.to(device).eval()
    scores = MaskScores(data).to(device)
    millimetres = all(split.scans.spacing(i) is not None for i in range(len(split)))
    index, counts, distances = [], [], []
    for batch in batches:
        with autocast(device, precision):
            logits = model(batch.images).float()
        counts.append(scores.update(logits, batch.targets).cpu().numpy())
        found = predicted_masks(logits, multilabel=data.masks.multilabel).cpu()
        places = batch.index.cpu().numpy()
        index.append(places)
        true = batch.targets.cpu().numpy()
        for i, mine, wanted in zip(places.tolist(), found.numpy(), true, strict=True):
            spacing = _spacing(split, i) if millimetres else (1.0, 1.0)
            distances.append(_distances(mine, wanted, scores, spacing))
    rows = np.concatenate(index)
    codes = {name: code for code, name in enumerate(sorted(set(split.scans.groups)))}
    groups = np.array([codes[split.scans.groups[i]] for i in rows], dtype=np.int64)
    return MaskScored(
        metrics=scores.compute(),
        index=rows,
        groups=groups,
        counts=np.concatenate(counts),
        hausdorff=np.stack(distances),
        unit="mm" if millimetres else "px",
        classes=data.classes,
        scored=tuple(scores.scored),
    )


def _distances(
    found: NDArray[np.int64],
    true: NDArray[np.int64],
    scores: MaskScores,
    spacing: tuple[float, float],
) -> NDArray[np.float64]:
    """Hausdorff distance of each class of an image, NaN of those that do not count."""
    told = np.full(scores.num_classes, np.nan)
    for k in scores.scored:
        if scores.multilabel:
            mine, wanted, out = found[k] == 1, true[k] == 1, true[k] == IGNORE
        else:
            mine, wanted, out = found == k, true == k, true == IGNORE
        told[k] = overlap.hausdorff(mine & ~out, wanted, spacing)
    return told


def _spacing(split: Split, i: int) -> tuple[float, float]:
    """Millimetres of a row and of a column of image ``i`` at the size the model sees."""
    assert split.scans is not None
    spacing = split.scans.spacing(i)
    assert spacing is not None
    (height, width), (wanted_height, wanted_width) = split.scans.size(i), split.image_size
    return spacing[0] * height / wanted_height, spacing[1] * width / wanted_width
