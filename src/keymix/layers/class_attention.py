# SPDX-License-Identifier: Apache-2.0
"""Class attention: one query, the class token's, over itself and all patches."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError


class ClassAttention(nn.Module):
    r"""Attention of the class token over itself and the patches, with heads mixed twice.

    :math:`\mathrm{out} = P_2\,\mathrm{softmax}(P_1\, q K^\top / \sqrt d)\, V`, where q comes from
    the class token alone and P_1, P_2 mix the heads, both starting at the identity.
    Paper: Going deeper with Image Transformers, https://arxiv.org/abs/2103.17239, Sec. 3.
    Differs from timm's: the heads are mixed, as in the network behind SKA's CaiT rows, and their
    width d is free, C / h if None. The parameters have timm's names, with ``talking_pre`` and
    ``talking_post`` ``[h, h]`` in addition.

    Shape: x ``[B, 1 + N, C]``, the class token first -> ``[B, 1, C]``.
    Cost: (2 N + 4) C^2 + (2 C + 2 h^2) (N + 1) multiply-adds at h d = C.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 8,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        if head_dim is None:
            if dim % num_heads:
                raise UserError(
                    f"{dim=} does not divide into {num_heads=} heads of class attention; give "
                    "their width, class_head_dim="
                )
            head_dim = dim // num_heads
        self.num_heads, self.head_dim = num_heads, head_dim
        self.scale = head_dim**-0.5
        inner = num_heads * head_dim
        self.q = nn.Linear(dim, inner, bias=qkv_bias, **factory)
        self.k = nn.Linear(dim, inner, bias=qkv_bias, **factory)
        self.v = nn.Linear(dim, inner, bias=qkv_bias, **factory)
        self.talking_pre = nn.Parameter(torch.empty(num_heads, num_heads, **factory))
        self.talking_post = nn.Parameter(torch.empty(num_heads, num_heads, **factory))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(inner, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let every head speak for itself: both mixing matrices at the identity."""
        nn.init.eye_(self.talking_pre)
        nn.init.eye_(self.talking_post)

    def forward(self, x: Float[Tensor, "B M C"]) -> Float[Tensor, "B 1 C"]:
        """Attend from the class token."""
        heads = (self.num_heads, self.head_dim)
        q = self.q(x[:, :1]).unflatten(-1, heads).transpose(1, 2)  # [B, h, 1, d]
        k = self.k(x).unflatten(-1, heads).transpose(1, 2)  # [B, h, M, d]
        v = self.v(x).unflatten(-1, heads).transpose(1, 2)
        logits = (q * self.scale) @ k.transpose(-2, -1)
        # heads last to mix them, and back: [B, h, 1, M]
        maps = (logits.movedim(1, 3) @ self.talking_pre.t()).softmax(-2)
        maps = self.attn_drop(maps @ self.talking_post.t()).movedim(3, 1)
        out: Tensor = self.proj_drop(self.proj((maps @ v).transpose(1, 2).flatten(2)))
        return out
