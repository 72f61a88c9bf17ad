# SPDX-License-Identifier: Apache-2.0
"""Linear map or convolution, batch norm, neuron: the step that spiking networks are made of."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn


def spiking_linear(
    x: Float[Tensor, "T *batch N C"], linear: nn.Module, norm: nn.Module, neuron: nn.Module
) -> Float[Tensor, "T *batch N D"]:
    """Return ``neuron(norm(linear(x)))``, the statistics of the norm over all but the last axis.

    Args:
        x: Spikes, steps first.
        linear: Maps C to D.
        norm: Over the D channels; an identity where it is folded into the linear map.
        neuron: Maps currents ``[T, ...]`` to spikes.
    """
    y = linear(x)
    spikes: Tensor = neuron(norm(y.flatten(0, -2)).view(y.shape))
    return spikes


def pooled(pool: nn.Module | None, lead: Sequence[int], y: Tensor) -> Tensor:
    """Pool images ``[T B, D, h, w]`` if there is a pool, and split the first axis into T, B."""
    y = y if pool is None else pool(y)
    return y.view(*lead, *y.shape[1:])


def spiking_conv(
    x: Float[Tensor, "S B C H W"],
    conv: nn.Module,
    norm: nn.Module,
    neuron: nn.Module,
    pool: nn.Module | None = None,
    steps: int | None = None,
) -> Float[Tensor, "T B D h w"]:
    """Return ``neuron(pool(norm(conv(x))))``; images that lie channels last stay so.

    Args:
        x: Spikes or images, steps first; or one step ``[1, B, C, H, W]`` that stands for all, so
            that all but the neuron runs once.
        conv: Maps C channels to D, the steps folded into the batch.
        norm: Over the D channels; an identity where it is folded into the convolution.
        neuron: Maps currents ``[T, ...]`` to spikes.
        pool: What stands between norm and neuron; None for nothing.
        steps: Steps T that come out; None for those of ``x``.
    """
    currents = pooled(pool, x.shape[:2], norm(conv(x.flatten(0, 1))))
    spikes: Tensor = neuron(currents.expand(steps or len(x), -1, -1, -1, -1))
    return spikes
