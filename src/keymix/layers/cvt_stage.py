# SPDX-License-Identifier: Apache-2.0
"""CvT: convolutions make the tokens of a stage, and what its queries, keys and values are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath, Mlp, QuickGELU
from torch import Tensor, nn

from keymix.layers.checkpoint import checkpointed
from keymix.layers.folding import Foldable, fold_norm

Grid = tuple[int, int]


class ConvProjection(Foldable):
    """Depthwise 3x3 convolution without bias and BatchNorm on the patch tokens.

    Paper: CvT, https://arxiv.org/abs/2103.15808, Sec. 3.2. Prefix tokens pass by: they have no
    neighbours. With a stride above 1 there are fewer keys than tokens. The linear map to heads,
    which the paper counts in, is the mixer's.

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

    def fold(self) -> None:
        """Fold the norm into the convolution."""
        fold_norm(self, "conv", "bn")

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
    """Makes the projection of a role: queries at every token, keys and values with a stride."""

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


class ConvEmbed(nn.Module):
    """Overlapping patches as tokens: a convolution with bias, then LayerNorm.

    Paper: CvT, https://arxiv.org/abs/2103.15808, Sec. 3.1. Kernel size, stride and padding are in
    pixels of the image given.

    Shape: image ``[B, in_chans, H, W]`` -> tokens ``[B, h w, dim]`` and the grid (h, w).
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        *,
        kernel_size: int,
        stride: int,
        padding: int,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride, padding, **factory)
        self.norm = nn.LayerNorm(dim, **factory)

    def grid(self, image: Grid) -> Grid:
        """Grid of the tokens of an image of this height and width."""
        sides = [(side + 2 * self.padding - self.kernel_size) // self.stride + 1 for side in image]
        return sides[0], sides[1]

    def forward(self, image: Float[Tensor, "B c H W"]) -> tuple[Float[Tensor, "B N C"], Grid]:
        """Cut the image into tokens."""
        image = self.proj(image)
        grid = (image.shape[-2], image.shape[-1])
        tokens: Tensor = self.norm(image.flatten(2).transpose(1, 2))
        return tokens, grid


class CvTBlock(nn.Module):
    """Pre-norm block whose mixer gets the grid: x + attn(norm1(x)), x + mlp(norm2(x)).

    The activation of the MLP is QuickGELU.
    """

    def __init__(
        self,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.norm1 = nn.LayerNorm(dim, **factory)
        self.attn: nn.Module = nn.Identity()  # a host puts the mixer here
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, **factory)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=QuickGELU, drop=proj_drop, **factory)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Float[Tensor, "B N C"], grid: Grid) -> Float[Tensor, "B N C"]:
        """Mix the tokens, then transform each."""
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        out: Tensor = x + self.drop_path2(self.mlp(self.norm2(x)))
        return out


class CvTStage(nn.Module):
    """Convolutional embedding, an optional class token, and blocks.

    ``embed`` is kernel size, stride and padding of the embedding, ``kv_stride`` the step of the
    convolutions that make keys and values, ``drop_path`` a probability per block. Heads, the stride
    and the rates of its attention are for the mixers that a host puts in.

    Shape: image ``[B, in_chans, H, W]`` -> tokens ``[B, P + h w, dim]`` and the grid (h, w).
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        *,
        num_heads: int,
        kv_stride: int,
        embed: tuple[int, int, int],
        class_token: bool,
        drop_path: Sequence[float],
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        qkv_bias: bool = True,
        mlp_ratio: float = 4.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.kv_stride = dim, num_heads, kv_stride
        self.attn_drop, self.proj_drop, self.qkv_bias = attn_drop, proj_drop, qkv_bias
        self.num_prefix_tokens = int(class_token)
        self.grad_checkpointing = False
        kernel_size, stride, padding = embed
        self.patch_embed = ConvEmbed(
            in_chans, dim, kernel_size=kernel_size, stride=stride, padding=padding, **factory
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim, **factory)) if class_token else None
        self.blocks = nn.ModuleList(
            CvTBlock(dim, mlp_ratio=mlp_ratio, proj_drop=proj_drop, drop_path=rate, **factory)
            for rate in drop_path
        )

    def forward(self, image: Float[Tensor, "B c H W"]) -> tuple[Float[Tensor, "B N C"], Grid]:
        """Embed and mix."""
        tokens, grid = self.patch_embed(image)
        if self.cls_token is not None:
            tokens = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), 1)
        for block in self.blocks:
            tokens = checkpointed(block, tokens, grid, when=self.grad_checkpointing)
        return tokens, grid
