# SPDX-License-Identifier: Apache-2.0
"""Whether a classifier does better than guessing."""

from __future__ import annotations

import math


def no_better_than_chance(top1: float, *, classes: int, images: int) -> bool:
    """Tell whether an accuracy lies within two standard errors of chance, or below.

    Chance is 1 / classes, its standard error over so many images sqrt(p (1 - p) / images).

    Args:
        top1: Share of right answers.
        classes: Classes to choose from.
        images: How many were answered.
    """
    chance = 1 / classes
    return top1 <= chance + 2 * math.sqrt(chance * (1 - chance) / images)
