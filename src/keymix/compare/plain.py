# SPDX-License-Identifier: Apache-2.0
"""The trained point of reference: a network without attention whose step takes the same time."""

from __future__ import annotations

import math
import time

from keymix.analysis.measure import training_ms
from keymix.data.dataset import ImageData
from keymix.train.model import device_of_this_machine, model_for
from keymix.train.recipe import Recipe, replace_path

PLAIN = "plain network"
"""Label of the trained reference."""
FIRST, LEAST, MOST = 16, 4, 256
"""Width that is tried first, and taken where nothing can be timed; the least and the most."""
ALIKE = 0.2
"""Share by which the time of its training step may differ from the baseline's."""
SECONDS, STEP_SECONDS, WIDTHS = 20.0, 0.25, 4
"""Sizing takes less than the first, with batches of which a step of the baseline takes the second,
and measures so many widths at most."""
_POWER = 1.5  # of the width that the time of a step is taken to grow with, at first


def sized(
    base: Recipe, plain: Recipe, data: ImageData, shape: tuple[int, ...], *, step: float
) -> tuple[int, float]:
    """Return the width of a plain network, and its training step's time over the baseline's.

    Forward and backward are timed in turns, on one thread as costs are: at a first width, then
    where the ratio should be 1 by a power law, until it is. `step` is the time of the baseline's.
    """
    device, begun = device_of_this_machine(), time.perf_counter()
    batch = min(base.data.batch_size, len(data.train))
    batch = max(min(2, batch), min(batch, int(batch * STEP_SECONDS / step)))
    models = {"base": model_for(base, data.record()).to(device)}
    ratios: dict[int, float] = {}
    width, power = FIRST, _POWER
    while width not in ratios and len(ratios) < WIDTHS:
        recipe = replace_path(plain, {"model.options.width": width})
        models["plain"] = model_for(recipe, data.record()).to(device)
        found = training_ms(
            models,
            shape,
            batch_size=batch,
            seconds=SECONDS / 2 / WIDTHS,
            threads=1,
            task=data.task.name,
        )
        ratios[width] = found["plain"] / found["base"]
        near = sorted(ratios, key=lambda each: abs(math.log(ratios[each])))
        best = near[0]
        if 1 - ALIKE / 2 <= ratios[best] <= 1 + ALIKE / 2:
            break
        if time.perf_counter() - begun > SECONDS * (WIDTHS - 1) / WIDTHS:
            break
        if near[1:]:
            slope = math.log(ratios[best] / ratios[near[1]]) / math.log(best / near[1])
            power = min(max(slope, 0.5), 3.0)
        width = min(max(2 * round(best * ratios[best] ** (-1 / power) / 2), LEAST), MOST)
    return best, ratios[best]
