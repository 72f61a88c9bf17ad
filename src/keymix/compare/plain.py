# SPDX-License-Identifier: Apache-2.0
"""The trained point of reference: a network without attention whose step takes the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from keymix.compare import budget
from keymix.compare.budget import Load
from keymix.compare.question import Plan, PlannedMixer
from keymix.data.dataset import ImageData
from keymix.errors import FAILURES, reason
from keymix.models.match import trainable
from keymix.train.model import model_for

PLAIN = "plain network"
"""Label of the trained reference."""
FIRST, LEAST, MOST = 16, 4, 256
"""Width that is tried first, and taken where nothing can be timed; the least and the most."""
ALIKE = 0.2
"""Share by which the time of its training step may differ from the baseline's."""
SECONDS, WIDTHS = 20.0, 5
"""Seconds, after half of which no further width is tried; widths that are tried at most."""
_POWER = 1.5  # of the width that the time of a step is taken to grow with, at first


def with_plain_network(plan: Plan, data: ImageData, before: Plan | None, kept: Plan | None) -> Plan:
    """Add the task's plain network: that which the folder has, else one without a width yet."""
    name, there = data.task.plain, () if before is None else before.mixers
    network = next((each for each in there if each.reference), None)
    gave_way = kept is not None and kept.question.reference and network is None
    question = plan.question
    unlike = question.first or question.start is not None  # it would start from nothing
    if not name or not question.reference or unlike or gave_way:
        return plan
    network = network or PlannedMixer(
        label=PLAIN,
        slug=PLAIN.replace(" ", "-"),
        control=False,
        reference=True,
        mixes_prefix=True,
        params=0,
        model=name,
        options={"width": FIRST},
    )
    return replace(plan, mixers=(*plan.mixers, network))


def with_its_width(plan: Plan, data: ImageData, load: Load, *, say: Callable[[str], None]) -> Plan:
    """Make a plain network that has no width yet as wide as the baseline is slow."""
    *rest, network = plan.mixers
    if not network.reference or network.params:
        return plan
    say("sizing the plain network")
    time_of = partial(budget.timed, data=data, threads=plan.threads)
    base = plan.mixers[plan.labels.index(plan.baseline)]

    def step(width: int) -> float:
        return time_of(plan.recipe_for(replace(network, options={"width": width}), 0)).step

    try:
        wanted = load.trials.get(plan.baseline) or time_of(plan.recipe_for(base, 0))
        width, took = sized(step, wanted.step)
    except FAILURES as error:  # of a baseline of the user's, as its runs will fail
        width, how = FIRST, f"not sized, since {plan.baseline} makes no step: {reason(error)}"
    else:
        unlike = "" if 1 - ALIKE <= took <= 1 + ALIKE else ", the nearest that there is"
        how = f"whose training step took {took:.2f} of the time of {plan.baseline}'s{unlike}"
    note = f"no attention: {network.model} of width {width}, {how}."
    network = replace(network, options={"width": width}, note=note)
    params = trainable(model_for(plan.recipe_for(network, 0), data.record()))
    return replace(plan, mixers=(*rest, replace(network, params=params)))


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
