# SPDX-License-Identifier: Apache-2.0
"""A stage of CvT: a convolution makes the tokens, blocks mix them on their grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath, Mlp, QuickGELU
from torch import Tensor, nn

from keymix.layers.checkpoint import checkpointed

Grid = tuple[int, int]


class ConvEmbed(nn.Module):
    """Overlapping patches as tokens: a convolution with bias, then LayerNorm.

    Paper: CvT, https://arxiv.org/abs/2103.15808, Sec. 3.1.

    Args:
        in_chans: Channels of the image.
        dim: Width of the tokens.
        kernel_size: Side of a patch, pixels of the image given.
        stride: Step from patch to patch, pixels.
        padding: Zeros laid around the image, pixels.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

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
    """Pre-norm block whose mixer hears of the grid: x + attn(norm1(x)), x + mlp(norm2(x)).

    Args:
        dim: Width C of the tokens.
        mlp_ratio: Hidden width of the MLP over C; its activation is QuickGELU.
        proj_drop: Probability of dropping a value of the MLP.
        drop_path: Probability of dropping a branch.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
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

    Args:
        in_chans: Channels of the image it takes.
        dim: Width C of its tokens.
        num_heads: Heads of its mixers.
        kv_stride: Step of the convolutions that make keys and values.
        embed: Kernel size, stride and padding of the embedding, pixels of the image it takes.
        class_token: Whether a learned token goes before the patches.
        drop_path: Probability of dropping a branch, one a block.
        attn_drop: For the mixers: probability of dropping an entry of a map.
        proj_drop: Probability of dropping a value of mixers' outputs and MLPs.
        qkv_bias: For the mixers: biases of their input projections.
        mlp_ratio: Hidden width of the MLPs over C.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

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
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpointed(block, tokens, grid)
            else:
                tokens = block(tokens, grid)
        return tokens, grid
