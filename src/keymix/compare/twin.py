# SPDX-License-Identifier: Apache-2.0
"""A spiking network beside its twin without spikes: same recipe, same seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keymix.compare.plan import Entrant, Plan, meta_builder
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


def with_twin(plan: Plan, data: ImageData) -> Plan:
    """Return the plan with the twin of its baseline as one more row.

    The twin is the same model with the same mixer and as many weights, ReLU in place of every
    neuron, and one time step. Recordings of events keep their frames, one after another through
    the network, so that both see the same data.

    Args:
        plan: A comparison of spiking mixers.
        data: Its images.

    Raises:
        UserError: If the model has no spikes, or takes no ReLU for its neurons.
    """
    from keymix.mixers.spec import parse_mixer
    from keymix.models.match import trainable

    if not plan.spiking:
        raise UserError(
            f"--twin: {plan.recipe.model.name} has no spikes to do without. Choose a spiking model "
            "such as qkformer_micro_32, or leave --twin out."
        )
    frames = "T" in data.kind.axes
    options: dict[str, Any] = {"neuron": "relu"} | ({} if frames else {"time_steps": 1})
    spec = parse_mixer(plan.baseline)
    shared = replace(
        plan.recipe, model=replace(plan.recipe.model, options=plan.recipe.model.options | options)
    )
    steps = f"on the same {data.time_steps} frames" if frames else "at one time step"
    sibling = next(entrant for entrant in plan.entrants if entrant.label == plan.baseline)
    twin = Entrant(
        label=f"twin of {plan.baseline}",
        slug=f"twin-of-{spec.slug}",
        control=False,
        mixes_prefix=sibling.mixes_prefix,
        params=trainable(meta_builder(shared, data)(spec)),
        note=f"the network of {plan.baseline} with ReLU in place of every neuron, {steps}: no "
        "spikes, every multiply-add made.",
        twin_of=plan.baseline,
        options=options,
    )
    return replace(plan, entrants=(*plan.entrants, twin))
