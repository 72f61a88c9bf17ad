# SPDX-License-Identifier: Apache-2.0
"""What any classifier should beat: the largest class, and logistic regression on few pixels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from keymix.analysis.answers import FloatArray, IntArray

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split

SIDE = 16
"""Pixels a side that logistic regression sees; larger images are averaged down to them."""
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
"""Inverse strengths C of the L2 penalty that are tried."""
MOST_IMAGES = 20_000
"""Training images that it learns from at most, so that it takes seconds."""
_ITERATIONS = 200
_CHUNK = 1024  # images read at once


def largest_class(data: ImageData, split: Split) -> FloatArray:
    """Return the shares of the classes in training for every image of a split, ``[N, K]``."""
    often = np.bincount(data.train.labels.numpy(), minlength=len(data.classes))
    shares: FloatArray = np.tile(often / often.sum(), (len(split), 1))
    return shares


def logistic_regression(
    data: ImageData, score: Callable[[FloatArray], float]
) -> tuple[FloatArray, float, str]:
    """Fit multinomial logistic regression on pixels; the penalty is chosen on validation.

    `score` scores the probabilities of the validation split, more is better. Returned are those of
    every test image, ``[N, K]``, the score of the validation split, and what was fitted.
    """
    from sklearn.linear_model import LogisticRegression  # late: it takes a second to import

    chosen = _spread(len(data.train))
    train, labels = _pixels(data.train, chosen), data.train.labels.numpy()[chosen]
    mean, spread = train.mean(axis=0), train.std(axis=0) + 1e-6
    val, test = ((_pixels(each) - mean) / spread for each in (data.val, data.test))
    found = []
    for c in STRENGTHS:
        model = LogisticRegression(C=c, max_iter=_ITERATIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged, which validation judges
            model.fit((train - mean) / spread, labels)
        shares = _all_classes(model.predict_proba(val), model.classes_, len(data.classes))
        found.append((score(shares), c, model))
    best, strength, model = max(found, key=lambda each: (each[0], -each[1]))
    some = (
        f" of {len(chosen):,} training {data.kind.nouns}" if len(chosen) < len(data.train) else ""
    )
    height, width = (min(SIDE, side) for side in data.image_size)
    about = f"on {height}x{width} pixels{some}, penalty C = {strength:g} chosen on validation"
    shares = _all_classes(model.predict_proba(test), model.classes_, len(data.classes))
    return shares, best, about


def _spread(count: int) -> IntArray:
    """Choose at most `MOST_IMAGES` positions, evenly spread."""
    step = max(1, -(-count // MOST_IMAGES))
    return np.arange(0, count, step)


def _pixels(split: Split, rows: IntArray | None = None) -> FloatArray:
    """Read inputs averaged down to `SIDE` pixels a side, frames summed over time, ``[N, D]``."""
    chosen = np.arange(len(split)) if rows is None else rows
    parts = []
    for start in range(0, len(chosen), _CHUNK):
        some = chosen[start : start + _CHUNK].tolist()
        read = torch.stack([split.read(i) for i in some]).float() / 255
        images = read.sum(1) if read.ndim == 5 else read
        height, width = (min(SIDE, side) for side in images.shape[-2:])
        parts.append(F.adaptive_avg_pool2d(images, (height, width)).flatten(1))
    found: FloatArray = torch.cat(parts).numpy().astype(np.float64)
    return found


def _all_classes(shares: FloatArray, known: IntArray, classes: int) -> FloatArray:
    """Give classes without a training image a probability of 0."""
    whole_table = np.zeros((len(shares), classes))
    whole_table[:, known] = shares
    return whole_table
