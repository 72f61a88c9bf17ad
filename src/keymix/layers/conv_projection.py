# SPDX-License-Identifier: Apache-2.0
"""CvT's convolutional projection: what queries, keys and values are taken from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ConvProjection(nn.Module):
    """Depthwise 3x3 convolution without bias and BatchNorm on the patch tokens.

    Paper: CvT, https://arxiv.org/abs/2103.15808, Sec. 3.2. Prefix tokens pass by: they have no
    neighbours. The linear map to heads, which the paper counts in, is the mixer's.

    Args:
        dim: Width C of the tokens.
        stride: Step of the convolution in tokens; above 1 there are fewer keys than tokens.
        num_prefix_tokens: Tokens P that stand before the patches.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[*, P + H W, C]`` -> ``[*, P + h w, C]`` with h = ceil(H / stride).
    Cost: 9 h w C multiply-adds, 11 C weights.
    """

    def __init__(
        self,
        dim: int,
        *,
        stride: int = 1,
        num_prefix_tokens: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.num_prefix_tokens = num_prefix_tokens
        self.conv = nn.Conv2d(
            dim, dim, 3, stride=stride, padding=1, groups=dim, bias=False, **factory
        )
        self.bn = nn.BatchNorm2d(dim, **factory)

    def forward(
        self, x: Float[Tensor, "*batch N C"], grid: tuple[int, int]
    ) -> Float[Tensor, "*batch M C"]:
        """Convolve the patch tokens, which lie row by row on ``grid``."""
        lead, P = x.shape[:-2], self.num_prefix_tokens
        image = x[..., P:, :].transpose(-2, -1).reshape(-1, x.shape[-1], *grid)
        image = self.bn(self.conv(image))
        patches = image.flatten(2).transpose(1, 2)
        patches = patches.reshape(*lead, *patches.shape[1:])
        return torch.cat((x[..., :P, :], patches), -2) if P else patches


@dataclass(frozen=True)
class RoleProjections:
    """Makes the projection of a role: queries at every token, keys and values with a stride.

    Attributes:
        dim: Width of the tokens.
        stride: Step of the keys' and values' convolution.
        num_prefix_tokens: Tokens before the patches.
        device: Where the weights are made.
        dtype: Their type.
    """

    dim: int
    stride: int
    num_prefix_tokens: int
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def __call__(self, role: str) -> ConvProjection:
        """Make it for ``"q"``, ``"k"`` or ``"v"``."""
        return ConvProjection(
            self.dim,
            stride=1 if role == "q" else self.stride,
            num_prefix_tokens=self.num_prefix_tokens,
            device=self.device,
            dtype=self.dtype,
        )
