# SPDX-License-Identifier: Apache-2.0
"""Q-K token and channel attention from the queries' currents on, QKFormer's Eq. 9 to 11."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from keymix.ops.neuron import reference
from keymix.ops.neuron.autograd import Coefficient
from keymix.ops.neuron.reference import Dynamics


@dataclass(frozen=True)
class Neuron:
    """Neurons as ``ops/neuron/reference.py`` has them, keep and gain numbers or tensors of one."""

    keep: Coefficient
    gain: Coefficient
    how: Dynamics


def masked_keys(
    currents: Float[Tensor, "T *batch N h d"],
    keys: Float[Tensor, "T *batch N h d"],
    queries: Neuron,
    attention: Neuron,
    axis: int,
) -> Float[Tensor, "T *batch N h d"]:
    r"""Mask keys by what their queries sum to.

    .. math::
        Q = SN(currents), \quad A = SN(\sum_{axis} Q), \quad X' = A \otimes K

    The axis is -1, the channels of a head (token attention), or -3, the tokens (channel attention).
    """
    spikes, _ = reference.integrate_and_fire(
        currents, keep=queries.keep, gain=queries.gain, how=queries.how
    )
    mask, _ = reference.integrate_and_fire(
        spikes.sum(axis, keepdim=True), keep=attention.keep, gain=attention.gain, how=attention.how
    )
    return mask * keys
