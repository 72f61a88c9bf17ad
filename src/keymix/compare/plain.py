# SPDX-License-Identifier: Apache-2.0
"""The trained point of reference: a network without attention whose step takes the same time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from keymix.analysis.measure import training_ms
from keymix.compare.plan import Plan, Planned, PlannedMixer, input_shape
from keymix.data.dataset import ImageData
from keymix.errors import reason
from keymix.models.match import trainable
from keymix.train.model import device_of_this_machine, model_for

PLAIN = "plain network"
"""Label of the trained reference."""
WIDTHS = (
    4,
    6,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    36,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
)
"""Widths that a plain network may have."""
ALIKE = 0.2
"""Share by which the time of its training step may differ from the baseline's."""
UNSIZED = 16
"""The width where the baseline cannot be timed."""
_SECONDS = 1.5  # of a measurement of the baseline next to one width


def with_plain_network(
    plan: Plan, data: ImageData, *, before: Planned | None, say: Callable[[str], None]
) -> Plan:
    """Add the task's plain network to a comparison, as wide as the baseline is slow.

    Its width is that of the folder's last plan, so that runs resume; else the one of `WIDTHS` whose
    training step, forward and backward, takes nearest to the baseline's time, measured in turns.
    `before` is the folder's last plan.
    """
    name = data.task.plain
    if not name:
        return plan
    known = None if before is None else next((m for m in before.mixers if m.model == name), None)
    network = known or sized(plan, data, name, say=say)
    notes = (*plan.notes, f"{network.label}: {network.note}")
    return replace(plan, mixers=(*plan.mixers, network), notes=notes)


def sized(plan: Plan, data: ImageData, name: str, *, say: Callable[[str], None]) -> PlannedMixer:
    """Choose the width of a plain network; see `with_plain_network`."""
    planned = PlannedMixer(
        label=PLAIN,
        slug=PLAIN.replace(" ", "-"),
        control=False,
        reference=True,
        mixes_prefix=True,
        params=0,
        model=name,
    )
    say("sizing the plain network")
    base = plan.mixers[plan.labels.index(plan.baseline)]
    device = device_of_this_machine()
    models = {"base": model_for(plan.recipe_for(base, 0), data.record()).to(device)}
    shape = input_shape(data.record())
    ratios: dict[int, float] = {}

    def ratio(i: int) -> float:
        if i not in ratios:
            tried = replace(planned, options={"width": WIDTHS[i]})
            models["plain"] = model_for(plan.recipe_for(tried, 0), data.record()).to(device)
            found = training_ms(
                models,
                shape,
                batch_size=min(plan.recipe.data.batch_size, len(data.train)),
                seconds=_SECONDS,
                threads=plan.threads,
                task=data.task.name,
            )
            ratios[i] = found["plain"] / found["base"]
        return ratios[i]

    try:
        low, high = 0, len(WIDTHS) - 1
        while low < high:  # the widest that is no slower
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ratio(middle) <= 1 else (low, middle - 1)
        near = [i for i in (low, low + 1) if i < len(WIDTHS)]
        chosen = min(near, key=lambda i: abs(math.log(ratio(i))))
        width, took = WIDTHS[chosen], ratios[chosen]
        unlike = "" if 1 - ALIKE <= took <= 1 + ALIKE else ", the nearest that there is"
        how = f"whose training step took {took:.2f} of the time of {plan.baseline}'s{unlike}"
    except Exception as error:  # of a baseline of the user's, as its runs will fail
        width, how = UNSIZED, f"not sized, since {plan.baseline} makes no step: {reason(error)}"
    made = replace(planned, options={"width": width})
    params = trainable(model_for(plan.recipe_for(made, 0), data.record()))
    unlike = "" if 1 - ALIKE <= took <= 1 + ALIKE else ", the nearest that there is"
    return replace(made, params=params, note=f"no attention: {name} of width {width}, {how}.")
