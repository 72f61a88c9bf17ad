# SPDX-License-Identifier: Apache-2.0
"""The trained point of reference: a network without attention whose step takes the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PLAIN = "plain network"
"""Label of the trained reference."""
FIRST, LEAST, MOST = 16, 4, 256
"""Width that is tried first, and taken where nothing can be timed; the least and the most."""
ALIKE = 0.2
"""Share by which the time of its training step may differ from the baseline's."""
SECONDS, WIDTHS = 20.0, 5
"""No width is tried after half of so long, nor more than so many."""
_POWER = 1.5  # of the width that the time of a step is taken to grow with, at first


def sized(
    step: Callable[[int], float], wanted: float, *, clock: Callable[[], float] = time.monotonic
) -> tuple[int, float]:
    """Return the width whose `step` takes nearest to the time that is wanted, and their ratio.

    A power law through the two nearest widths so far says which one is tried next.
    """
    begun, ratios = clock(), dict[int, float]()
    width, power = FIRST, _POWER
    while width not in ratios and len(ratios) < WIDTHS and clock() - begun < SECONDS / 2:
        ratios[width] = step(width) / wanted
        near = sorted(ratios, key=lambda each: abs(math.log(ratios[each])))
        best = near[0]
        if abs(ratios[best] - 1) <= ALIKE / 2:
            break
        if near[1:]:
            slope = math.log(ratios[best] / ratios[near[1]]) / math.log(best / near[1])
            power = min(max(slope, 0.5), 3.0)
        width = min(max(2 * round(best * ratios[best] ** (-1 / power) / 2), LEAST), MOST)
    return best, ratios[best]
