# SPDX-License-Identifier: Apache-2.0
"""The mean and deviation that images are normalised by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keymix.data.measure import mean_std, sample

if TYPE_CHECKING:
    from keymix.data.dataset import Split


def statistics_of(train: Split) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Measure the mean and deviation of each channel over the images to learn from, values 0..1.

    Returns:
        Mean, deviation, and in words of which images they are.
    """
    if train.images is not None:
        return *mean_std([train.images.numpy()]), "all training images"
    rows = sample(len(train))
    mean, std = mean_std([train.read(int(i)).numpy()[None] for i in rows])
    few = len(rows) < len(train)
    return (
        mean,
        std,
        f"a fixed sample of {len(rows)} training images" if few else "all training images",
    )
