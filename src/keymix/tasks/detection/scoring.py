# SPDX-License-Identifier: Apache-2.0
r"""Average precision of weighted images, from which COCO's scores and their intervals come.

Detections of a class are ranked over all images, the surest first. With weights :math:`w` of the
images, :math:`t_j` and :math:`n_j` are the summed weights of those that are right, and that count
at all, among the first :math:`j`, and :math:`p` that of the true instances:

.. math::

    P_j = \max_{i \ge j} \frac{t_i}{n_i}, \qquad R_j = \frac{t_j}{p}, \qquad
    \mathrm{AP} = \frac{1}{101} \sum_{r \in \{0, 0.01, \dots, 1\}} P_{\min \{ j : R_j \ge r \}}

and 0 for an :math:`r` that is not reached. It is averaged over IoU thresholds and over the classes
that have true instances. With all weights 1 this is COCO's (Lin et al. 2014, arXiv:1405.0312); with
whole numbers, that of images repeated so often.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from keymix.analysis.answers import FloatArray, IntArray
from keymix.tasks.detection.matching import BoolArray

RECALLS = np.linspace(0.0, 1.0, 101)
"""Recalls at which precision is read."""
_CELLS = 1_000_000
"""Weights of detections that are in memory together."""
_EPSILON = float(np.spacing(1))
_BOUNDS = np.array([*RECALLS, np.inf])


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranked:
    """The detections of one class, the surest first, of one shape and range of areas.

    Shape: `image` ``[D]``, the row of each one's image; `right` and `counted` ``[T, D]``, whether
    a detection is right, and whether it is right or wrong; `positives` ``[U]``, true instances that
    count, of each image.
    """

    image: IntArray
    right: BoolArray
    counted: BoolArray
    positives: FloatArray

    @property
    def images(self) -> IntArray:
        """Rows of the images that have a detection or a true instance of the class."""
        with_it = np.bincount(self.image, minlength=len(self.positives)) + self.positives
        return np.flatnonzero(with_it)

    def precision(self, weights: FloatArray) -> FloatArray:
        """Average the precision at each threshold: weights ``[R, U]`` -> ``[R, T]``.

        NaN where the weighted images have no true instance.
        """

        def steps(t: int, rows: slice) -> tuple[FloatArray, FloatArray]:
            places, image = self._places(t)
            mine = by_image[image, rows]  # [D, R]: sums run along the first axis, many at once
            return mine[places], np.add.reduceat(mine, [0, *(places[:-1] + 1)], axis=0)

        by_image = np.ascontiguousarray(weights.T)
        return self._averaged(steps, weights @ self.positives)

    def without(self, images: IntArray) -> FloatArray:
        """Average the precision without each of some images in turn: ``[n]`` -> ``[n, T]``."""

        def steps(t: int, rows: slice) -> tuple[FloatArray, FloatArray]:
            places, image = self._places(t)
            left_out = images[rows]
            true = (image[places][:, None] != left_out).astype(np.float64)
            column = np.searchsorted(left_out, image)
            column[column == len(left_out)] = 0
            mine = np.flatnonzero(left_out[column] == image)
            cell = np.searchsorted(places, mine) * len(left_out) + column[mine]
            less = np.bincount(cell, minlength=true.size).reshape(true.shape)
            return true, np.diff(places, prepend=-1)[:, None] - less

        return self._averaged(steps, self.positives.sum() - self.positives[images])

    def alone(self, threshold: int) -> FloatArray:
        """Average the precision on each image alone at a threshold: -> ``[U]``.

        NaN of images without a true instance.
        """
        found = np.full(len(self.positives), np.nan)
        order = np.argsort(self.image, kind="stable")
        ends = np.searchsorted(self.image[order], np.arange(len(found) + 1))
        for i in np.flatnonzero(self.positives):
            mine = order[ends[i] : ends[i + 1]]
            only = Ranked(
                image=np.zeros(len(mine), dtype=np.int64),
                right=self.right[threshold : threshold + 1, mine],
                counted=self.counted[threshold : threshold + 1, mine],
                positives=self.positives[i : i + 1],
            )
            found[i] = only.precision(np.ones((1, 1)))[0, 0]
        return found

    def _places(self, t: int) -> tuple[IntArray, IntArray]:
        """Places of the right ones among those that count up to the last right one; their images.

        Precision is the highest, and recall rises, at detections that are right: the curve is read
        only there.
        """
        counted = np.flatnonzero(self.counted[t])
        places = np.flatnonzero(self.right[t, counted])
        return places, self.image[counted[: places[-1] + 1]]

    def _averaged(self, steps: Steps, positives: FloatArray) -> FloatArray:
        """Average the precision of weighted detections: the weights of true instances ``[R]``.

        `steps` gives of a threshold and some of the R what each right detection adds to those that
        are right, and with the wrong ones before it to those that count, ``[P, R]`` twice.
        """
        found = np.zeros((len(positives), len(self.right)))
        step = max(1, _CELLS // max(1, len(self.image)))
        for t in np.flatnonzero(self.right.any(axis=1)):
            for start in range(0, len(positives), step):
                rows = slice(start, start + step)
                found[rows, t] = _area(*steps(int(t), rows), positives[rows])
        return np.where(positives[:, None] > 0, found, np.nan)


Steps = Callable[[int, slice], tuple[FloatArray, FloatArray]]


def _area(true: FloatArray, every: FloatArray, positives: FloatArray) -> FloatArray:
    """Average the precision over `RECALLS`, by what each right detection adds; see `Ranked`."""
    true, every = np.cumsum(true, axis=0), np.cumsum(every, axis=0)
    ratio = true / (every + _EPSILON)
    envelope = np.maximum.accumulate(ratio[::-1], axis=0)[::-1]
    recall = true / np.where(positives > 0, positives, 1.0)
    reached = (recall * (len(RECALLS) - 1)).astype(np.int64)  # perhaps one too few or too many
    reached += _BOUNDS[reached + 1] <= recall
    reached -= _BOUNDS[reached] > recall
    recalls = np.where(true > 0, reached + 1, 0)
    found: FloatArray = (envelope * np.diff(recalls, axis=0, prepend=0)).sum(axis=0)
    return found / len(RECALLS)


def averaged(classes: Sequence[Ranked], weights: FloatArray) -> FloatArray:
    """Average over classes at each threshold: weights ``[R, U]`` -> ``[R, T]``.

    NaN where no class has a true instance.
    """
    return mean([each.precision(weights) for each in classes])


def averaged_without(classes: Sequence[Ranked]) -> FloatArray:
    """Average over classes and thresholds without each image in turn: -> ``[U]``.

    As `averaged` with weights of 0 and 1, in a fraction of the time: an image changes only the
    classes that it has.
    """
    scores = []
    for each in classes:
        units, images = len(each.positives), each.images
        of_class = np.repeat(each.precision(np.ones((1, units))).mean(axis=1), units)
        of_class[images] = each.without(images).mean(axis=1)
        scores.append(of_class)
    return mean(scores)


def of_each_image(classes: Sequence[Ranked], threshold: int) -> FloatArray:
    """Average over the classes that an image has, on it alone, at a threshold: -> ``[U]``.

    NaN of images without true instances.
    """
    return mean([each.alone(threshold) for each in classes])


def mean(scores: Sequence[FloatArray]) -> FloatArray:
    """Average over classes what is no NaN; NaN where all is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        found: FloatArray = np.nanmean(np.stack(scores), axis=0)
    return found
