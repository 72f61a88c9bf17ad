# SPDX-License-Identifier: Apache-2.0
"""The MLP of spiking Transformers: linear map, batch norm and neuron, twice."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keymix.layers.neurons import NeuronMaker
from keymix.layers.spiking_block import spiking_linear


class SpikingMlp(nn.Module):
    """Spiking MLP: S' = SN(BN(Linear(S))), twice, the first to the hidden width.

    Paper: Spikformer, https://arxiv.org/abs/2209.15425, Sec. 3.2; QKFormer's SMLP is the same.

    Args:
        dim: Width C of the tokens.
        hidden: Width between the two.
        neuron: Makes the neurons.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[T, B, N, C]`` -> the same.
    Cost: 2 C hidden multiply-adds a token and step; 2 C hidden + 3 hidden + 3 C parameters.
    """

    def __init__(
        self, dim: int, hidden: int, *, neuron: NeuronMaker, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.fc1 = nn.Linear(dim, hidden, **factory)
        self.bn1 = nn.BatchNorm1d(hidden, **factory)
        self.sn1 = neuron(**factory)
        self.fc2 = nn.Linear(hidden, dim, **factory)
        self.bn2 = nn.BatchNorm1d(dim, **factory)
        self.sn2 = neuron(**factory)

    def forward(self, x: Float[Tensor, "T B N C"]) -> Float[Tensor, "T B N C"]:
        """Transform every token."""
        x = spiking_linear(x, self.fc1, self.bn1, self.sn1)
        return spiking_linear(x, self.fc2, self.bn2, self.sn2)
