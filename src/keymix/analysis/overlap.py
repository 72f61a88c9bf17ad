# SPDX-License-Identifier: Apache-2.0
r"""How well predicted masks cover the true ones: Jaccard, Dice, HD95, surface Dice.

"Exploring the Integration of Key-Value Attention Into Pure and Hybrid Transformers for Semantic
Segmentation", https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 3, reports "Jaccard" and "weighted
Jaccard" and defines neither. These are ours. Of a class :math:`c` let :math:`I_c`, :math:`P_c` and
:math:`T_c` be the pixels that prediction and truth share, that are predicted, and that are true,
and let :math:`S` be the scored classes, all but the background:

.. math::

    J_c = \frac{I_c}{P_c + T_c - I_c} \qquad D_c = \frac{2 I_c}{P_c + T_c}
    \qquad J = \frac{1}{|S|} \sum_{c \in S} J_c
    \qquad J_w = \frac{\sum_{c \in S} T_c J_c}{\sum_{c \in S} T_c}

Pooled: the score of a split is that of the pixels of all its images, counted together, as mean IoU
is. It is no mean over images, in which an organ of three pixels would weigh as much as one of three
thousand.

Weighted: a class weighs in :math:`J_w` as many pixels as it truly has in the split.

Empty masks: a class that is neither predicted nor true has no score, NaN, and is left out of the
means; where none is left, prediction and truth agree that nothing is there, and each mean is 1. A
class that is only predicted, or only true, scores 0. Where no scored class is true and one is
predicted, :math:`J_w` is 0.

Ignored pixels, 255 in the truth, count nowhere. `overlap_counts` takes them in multi-label truth
too, each for its class alone; no data of keymix have them there: in folders of multi-label masks
255 is inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = 255
"""Value of the truth's pixels that count nowhere."""
TOLERANCE = 2.0
"""Distance, in mm or in px, up to which outlines agree in the surface Dice."""

Counts = NDArray[np.int64]
Pixels = NDArray[np.number[Any]]
"""Counted pixels; those of weighted images are fractions."""
Scores = NDArray[np.float64]


def overlap_counts(
    predicted: ArrayLike, target: ArrayLike, *, num_classes: int, multilabel: bool
) -> Counts:
    """Count the pixels of each image and class that all scores of overlap come from.

    Args:
        predicted: Class numbers, or 0 and 1 for each class where a pixel may have several.
        target: The truth, likewise; pixels of 255 count nowhere.
        num_classes: Classes K, the background among them.
        multilabel: Whether a pixel may have several classes, or none.

    Shape: ``[B, H, W]`` twice, or ``[B, K, H, W]`` twice if ``multilabel`` -> int64 ``[B, K, 3]``:
    pixels that both have, that are predicted, that are true.

    Raises:
        ValueError: If shapes differ or do not fit, or a value is no class.
    """
    import torch

    predictions, truth = np.asarray(predicted), np.asarray(target)
    axes = 4 if multilabel else 3
    if predictions.shape != truth.shape or predictions.ndim != axes:
        wanted = "[B, K, H, W]" if multilabel else "[B, H, W]"
        raise ValueError(
            f"predicted {predictions.shape} and target {truth.shape} are not one {wanted}"
        )
    if multilabel and predictions.shape[1] != num_classes:
        raise ValueError(f"masks {predictions.shape} have not {num_classes=} planes")
    counted = truth != IGNORED
    values = 2 if multilabel else num_classes
    for name, pixels in (("predicted", predictions), ("target", truth)):
        inside = pixels[counted]
        if inside.size and not 0 <= inside.min() <= inside.max() < values:
            raise ValueError(f"{name} has values outside 0..{values - 1}: {np.unique(inside)[:9]}")
    found, true = (torch.from_numpy(each.astype(np.int64)) for each in (predictions, truth))
    return count_overlap(found, true, num_classes=num_classes, multilabel=multilabel).numpy()


def count_overlap(found: Tensor, targets: Tensor, *, num_classes: int, multilabel: bool) -> Tensor:
    """Count as `overlap_counts` does what is known to be classes, on the device of the masks."""
    import torch

    counted = targets != IGNORED
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


def jaccard(counts: Pixels) -> Scores:
    """Divide the pixels that both have by those that either has: the Jaccard index, or IoU.

    Args:
        counts: Of `overlap_counts`, or sums of them over images.

    Shape: ``[..., K, 3]`` -> float64 ``[..., K]``, NaN where neither has the class.
    """
    both, predicted, true = np.moveaxis(np.asarray(counts), -1, 0)
    return _ratio(both, predicted + true - both)


def dice(counts: Pixels) -> Scores:
    """Divide the pixels that both have by the mean of what each has: the Dice coefficient, or F1.

    Args:
        counts: Of `overlap_counts`, or sums of them over images.

    Shape: ``[..., K, 3]`` -> float64 ``[..., K]``, NaN where neither has the class.
    """
    both, predicted, true = np.moveaxis(np.asarray(counts), -1, 0)
    return _ratio(2 * both, predicted + true)


def mean_jaccard(counts: Pixels, scored: Sequence[int]) -> Scores:
    """Average the Jaccard index over classes; 1 where no scored class is true or predicted.

    Args:
        counts: Of `overlap_counts`, summed over the images of a split for the split's score.
        scored: Numbers of the classes that count, all but the background.

    Shape: ``[..., K, 3]`` -> float64 ``[...]``.
    """
    return _mean(jaccard(_scored(counts, scored)))


def mean_dice(counts: Pixels, scored: Sequence[int]) -> Scores:
    """Average the Dice coefficient over classes; 1 where no scored class is true or predicted.

    Args:
        counts: Of `overlap_counts`, summed over the images of a split for the split's score.
        scored: Numbers of the classes that count, all but the background.

    Shape: ``[..., K, 3]`` -> float64 ``[...]``.
    """
    return _mean(dice(_scored(counts, scored)))


def weighted_jaccard(counts: Pixels, scored: Sequence[int]) -> Scores:
    """Average the Jaccard index over classes, each weighted by its true pixels.

    1 where no scored class is true or predicted; 0 where none is true and one is predicted.

    Args:
        counts: Of `overlap_counts`, summed over the images of a split for the split's score.
        scored: Numbers of the classes that count, all but the background.

    Shape: ``[..., K, 3]`` -> float64 ``[...]``.
    """
    chosen = _scored(counts, scored)
    each, true = jaccard(chosen), chosen[..., 2].astype(np.float64)
    total = true.sum(axis=-1)
    summed = np.where(true > 0, true * each, 0.0).sum(axis=-1)
    nothing = np.isnan(each).all(axis=-1)
    return np.where(nothing, 1.0, summed / np.where(total > 0, total, 1.0))


def surface_scores(
    predicted: NDArray[np.bool_],
    truth: NDArray[np.bool_],
    spacing: Sequence[float],
    *,
    tolerance: float = TOLERANCE,
) -> tuple[float, float]:
    r"""Measure how far apart the outlines of two masks lie: HD95 and surface Dice.

    With the distances :math:`d` of every outline pixel of one mask to the nearest one of the other,
    of the prediction to the truth and of the truth to the prediction, HD95 is the larger of the two
    95th percentiles, and surface Dice (https://arxiv.org/abs/1809.04430, Sec. 3.4) the share of
    both outlines with :math:`d \le` ``tolerance``. An outline has the pixels of a mask that have a
    neighbour outside of it, above, below, left or right, or lie at the edge of the image. As
    MONAI's ``compute_hausdorff_distance(percentile=95)`` and ``compute_surface_dice``.

    Args:
        predicted: The predicted mask of one class.
        truth: The true one.
        spacing: Distances of neighbouring pixels along each axis, in millimetres; ones measure in
            pixels.
        tolerance: How far from the other outline still counts as on it, in the unit of `spacing`.

    Shape: ``[H, W]`` or ``[D, H, W]`` twice -> HD95, NaN if a mask is empty; and surface Dice, 0 if
    one is empty, NaN if both are.

    Raises:
        ValueError: If shapes differ, or a spacing is not above 0.
    """
    from scipy.ndimage import binary_erosion
    from scipy.spatial import KDTree

    if predicted.shape != truth.shape or truth.ndim != len(spacing):
        raise ValueError(f"{predicted.shape=}, {truth.shape=} and {spacing=} do not fit")
    if not all(math.isfinite(step) and step > 0 for step in spacing):
        raise ValueError(f"{spacing=} is not numbers above 0")
    ours, theirs = (
        np.argwhere(mask & ~binary_erosion(mask)) * np.array(spacing, np.float64)
        for mask in (predicted.astype(bool), truth.astype(bool))
    )
    if not len(ours) or not len(theirs):
        return math.nan, 0.0 if len(ours) or len(theirs) else math.nan
    ways = KDTree(theirs).query(ours)[0], KDTree(ours).query(theirs)[0]
    hd95 = max(float(np.quantile(way, 0.95)) for way in ways)
    within = np.concatenate(ways) <= tolerance * (1 + 1e-6)  # 3 x 0.1 is 0.3
    return hd95, float(within.mean())


def _scored(counts: Pixels, scored: Sequence[int]) -> Pixels:
    return np.asarray(counts)[..., list(scored), :]


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> Scores:
    share = np.full(np.shape(whole), np.nan)
    np.divide(part, whole, out=share, where=whole > 0)
    return share


def _mean(each: Scores) -> Scores:
    """Average over the last axis what is no NaN; 1 where all is."""
    there = ~np.isnan(each)
    number = there.sum(axis=-1)
    summed = np.where(there, each, 0.0).sum(axis=-1)
    return np.where(number > 0, summed / np.maximum(number, 1), 1.0)
