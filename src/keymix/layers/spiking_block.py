# SPDX-License-Identifier: Apache-2.0
"""Linear map or convolution, batch norm, neuron: the step that spiking networks are made of."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


def spiking_linear(
    x: Float[Tensor, "T *batch N C"], linear: nn.Linear, norm: nn.BatchNorm1d, neuron: nn.Module
) -> Float[Tensor, "T *batch N D"]:
    """Return ``neuron(norm(linear(x)))``, the statistics of the norm over all but the last axis.

    Args:
        x: Spikes, steps first.
        linear: Maps C to D.
        norm: Over the D channels.
        neuron: Maps currents ``[T, ...]`` to spikes.
    """
    y: Tensor = linear(x)
    spikes: Tensor = neuron(norm(y.flatten(0, -2)).view(y.shape))
    return spikes


def spiking_conv(
    x: Float[Tensor, "T B C H W"],
    conv: nn.Conv2d,
    norm: nn.BatchNorm2d,
    neuron: nn.Module,
    pool: nn.Module | None = None,
) -> Float[Tensor, "T B D h w"]:
    """Return ``neuron(pool(norm(conv(x))))``; images that lie channels last stay so.

    Args:
        x: Spikes or images, steps first.
        conv: Maps C channels to D, the steps laid into the batch.
        norm: Over the D channels.
        neuron: Maps currents ``[T, ...]`` to spikes.
        pool: What stands between norm and neuron; None for nothing.
    """
    y: Tensor = norm(conv(x.flatten(0, 1)))
    if pool is not None:
        y = pool(y)
    spikes: Tensor = neuron(y.view(*x.shape[:2], *y.shape[1:]))
    return spikes
