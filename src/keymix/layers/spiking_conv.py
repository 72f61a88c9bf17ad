# SPDX-License-Identifier: Apache-2.0
"""Convolution, batch norm and neuron as one module: what spiking patch embeddings are made of."""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from keymix.layers.neurons import NeuronMaker
from keymix.layers.spiking_block import pooled, spiking_conv

Pooling = Literal["before", "after"]


class SpikingConv(nn.Module):
    """Convolution without bias, BatchNorm, neuron; max pooling before or behind the neuron.

    An image that does not change is handed in as one step: what stands before the neuron runs
    once, and its currents are the same at all T steps. The norm then counts n values where T
    copies would be nT: a batch adds n/(n - 1) times their variance to the running one, not
    nT/(nT - 1) times.

    Args:
        in_chans: Channels taken.
        out_chans: Channels given.
        kernel_size: Side of the kernel, odd, padded to keep the size.
        stride: Step of the kernel.
        pool: Where a 3x3 maximum of stride 2 stands: ``"before"`` or ``"after"`` the neuron; None
            for none.
        neuron: Makes the neurons; None for a step that ends at the norm.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: ``[T, B, c, H, W]``, or one step ``[1, B, c, H, W]`` -> ``[T, B, D, h, w]``, with
    h = ceil(H / stride), and half of that, rounded up, with pooling.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        pool: Pooling | None = None,
        neuron: NeuronMaker | None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        padding = kernel_size // 2
        self.conv = nn.Conv2d(
            in_chans, out_chans, kernel_size, stride, padding, bias=False, **factory
        )
        self.bn = nn.BatchNorm2d(out_chans, **factory)
        self.reduction = stride if pool is None else 2 * stride
        self.where = pool
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if pool is not None else None
        self.sn = neuron(**factory) if neuron is not None else None

    def forward(self, x: Float[Tensor, "S B c H W"], steps: int) -> Float[Tensor, "T B D h w"]:
        """Make spikes, or currents where there is no neuron.

        Args:
            x: T steps, or one that stands for all.
            steps: How many steps T come out.
        """
        first = self.pool if self.where == "before" else None
        if self.sn is not None and x.shape[0] == steps:
            spikes = spiking_conv(x, self.conv, self.bn, self.sn, first)
        else:
            spikes = pooled(first, x.shape[:2], self.bn(self.conv(x.flatten(0, 1))))
            spikes = spikes.expand(steps, -1, -1, -1, -1)
            if self.sn is not None:
                spikes = self.sn(spikes)
        if self.pool is None or self.where == "before":
            return spikes
        return pooled(self.pool, spikes.shape[:2], spikes.flatten(0, 1))
