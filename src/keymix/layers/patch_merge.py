# SPDX-License-Identifier: Apache-2.0
"""Patch merging without a norm: neighbouring tokens side by side, then one linear map."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError


class PatchMerge(nn.Module):
    """Concatenate f x f neighbouring tokens and map them to the next stage's width.

    The merging of the Swin behind SKA's rows (Table 9, "downscaling"): a linear map with bias of
    the unfolded tokens, column by column as in timm's PatchMerging. A factor of 1 only widens.
    Differs from timm's, which normalises first, has no bias and always halves. Sides that f does
    not divide are padded with zeros at the bottom and the right, as timm does.

    Args:
        dim: Width of the tokens that come in.
        out_dim: Width of those that go out.
        factor: Side f of what becomes one token.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[B, H, W, dim]`` -> ``[B, ceil(H / f), ceil(W / f), out_dim]``.
    Cost: f^2 dim out_dim multiply-adds a token that goes out.

    Raises:
        UserError: If the factor is less than 1.
    """

    def __init__(
        self, dim: int, out_dim: int, factor: int = 2, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        if factor < 1:
            raise UserError(f"merging {factor=} must be at least 1")
        self.factor = factor
        self.reduction = nn.Linear(factor**2 * dim, out_dim, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B h w D"]:
        """Merge them."""
        f = self.factor
        x = F.pad(x, (0, 0, 0, -x.shape[2] % f, 0, -x.shape[1] % f))
        B, H, W, C = x.shape
        x = x.reshape(B, H // f, f, W // f, f, C).permute(0, 1, 3, 4, 2, 5)
        out: Tensor = self.reduction(x.flatten(3))  # of [B, h, w, column, row, C]
        return out
