# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's bundled handwritten digits, each at its own place on a larger canvas.

Real data without a download: 1,797 images of 8x8 pixels with values 0..16 (UCI "Optical Recognition
of Handwritten Digits", https://doi.org/10.24432/C50P49). On centred digits a model needs no mixing
of tokens; a digit that may lie at any of 25 places makes tokens talk to each other.
"""

from __future__ import annotations

import numpy as np

from keymix.data.sample import Faults, Source, array_rows
from keymix.data.specs import source
from keymix.data.streams import IntArray, Stream, hash64

CANVAS = 12  # pixels per side
_DIGIT = 8
_PLACE_SEED = 20260  # fixed: the place of image i is part of the data set, not of a split


@source(
    "digits",
    summary="scikit-learn's 1,797 handwritten digits, each at its own place on a 12x12 canvas; "
    "no download",
)
def open_digits(argument: str, faults: Faults) -> Source:
    """Open the digits; they have no split of their own, so the test split (25 %) is split off."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # [N, 8, 8]
    places = _places(len(small))
    canvas = np.zeros((len(small), CANVAS, CANVAS), dtype=np.uint8)
    for image, digit, (top, left) in zip(canvas, small, places, strict=True):
        image[top : top + _DIGIT, left : left + _DIGIT] = digit
    return Source(
        rows=array_rows("digits", canvas[:, None], bunch.target),
        classes=tuple(str(d) for d in range(10)),
        in_chans=1,
        test_fraction=0.25,
        notes=(f"digits of 8x8 pixels, each at its own place on a {CANVAS}x{CANVAS} canvas",),
    )


def _places(count: int) -> IntArray:
    """Choose the top left corner of every image, [count, 2]."""
    side = CANVAS - _DIGIT + 1
    rows = np.arange(count, dtype=np.int64)
    place = (hash64(_PLACE_SEED, Stream.PLACE, rows) % np.uint64(side * side)).astype(np.int64)
    return np.stack([place // side, place % side], axis=1)
