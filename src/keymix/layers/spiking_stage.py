# SPDX-License-Identifier: Apache-2.0
"""A stage of a spiking Transformer: an embedding makes the tokens, blocks mix them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from timm.layers import DropPath
from torch import Tensor, nn

from keymix.layers.checkpoint import checkpointed
from keymix.layers.folding import Foldable, fold_norm
from keymix.layers.neurons import NeuronMaker
from keymix.layers.spiking_block import spiking_linear
from keymix.layers.spiking_embed import SpikingEmbeds, SpikingPatchEmbed, SpikingPatchSplitting

Grid = tuple[int, int]
Embedding = SpikingPatchEmbed | SpikingPatchSplitting | SpikingEmbeds


class StepsDropPath(DropPath):
    """Stochastic depth: an image loses a branch at all its steps or at none."""

    def forward(self, x: Float[Tensor, "T B N C"]) -> Float[Tensor, "T B N C"]:
        """Drop the branch of some images."""
        dropped: Tensor = super().forward(x.transpose(0, 1))
        return dropped.transpose(0, 1)


class SpikingMlp(Foldable):
    """Spiking MLP: S' = SN(BN(Linear(S))), twice, the first to the hidden width.

    Paper: Spikformer, https://arxiv.org/abs/2209.15425, Sec. 3.2; QKFormer's SMLP is the same.

    Shape: x ``[T, B, N, C]`` -> the same.
    Cost: 2 C hidden multiply-adds per token and step; 2 C hidden + 3 hidden + 3 C parameters.
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

    def fold(self) -> None:
        """Fold the norms into the linear maps."""
        fold_norm(self, "fc1", "bn1")
        fold_norm(self, "fc2", "bn2")

    def forward(self, x: Float[Tensor, "T B N C"]) -> Float[Tensor, "T B N C"]:
        """Transform every token."""
        x = spiking_linear(x, self.fc1, self.bn1, self.sn1)
        return spiking_linear(x, self.fc2, self.bn2, self.sn2)


class SpikingTransformerBlock(nn.Module):
    """Residual block on spikes: x + attn(x), x + mlp(x); both branches end with neurons.

    Paper: QKFormer, https://arxiv.org/abs/2403.16552, Eq. (13) and (14), as Spikformer's: the
    activation stands before the addition, so x counts spikes, 0, 1, 2, ….
    """

    def __init__(
        self,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        neuron: NeuronMaker,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.attn: nn.Module = nn.Identity()  # a host puts the mixer here
        self.drop_path1 = StepsDropPath(drop_path) if drop_path > 0 else nn.Identity()
        hidden = int(dim * mlp_ratio)
        self.mlp = SpikingMlp(dim, hidden, neuron=neuron, device=device, dtype=dtype)
        self.drop_path2 = StepsDropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Float[Tensor, "T B N C"], grid: Grid) -> Float[Tensor, "T B N C"]:
        """Mix the tokens, then transform each."""
        x = x + self.drop_path1(self.attn(x, grid))
        mixed: Tensor = x + self.drop_path2(self.mlp(x))
        return mixed


class SpikingStage(nn.Module):
    """An embedding and blocks; images and tokens are views of one memory, channels last.

    Heads, biases and neurons are for the mixers too; ``drop_path`` is a probability per block.

    Shape: ``[T, B, c, H, W]``, or one step for an image -> ``[T, B, C, h, w]``.
    """

    def __init__(
        self,
        patch_embed: Embedding,
        dim: int,
        *,
        num_heads: int,
        qkv_bias: bool = False,
        mlp_ratio: float = 4.0,
        drop_path: Sequence[float],
        neuron: NeuronMaker,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.qkv_bias = dim, num_heads, qkv_bias
        self.neuron = neuron
        self.grad_checkpointing = False
        self.patch_embed = patch_embed
        self.blocks = nn.ModuleList(
            SpikingTransformerBlock(
                dim,
                mlp_ratio=mlp_ratio,
                drop_path=rate,
                neuron=neuron,
                device=device,
                dtype=dtype,
            )
            for rate in drop_path
        )

    @property
    def reduction(self) -> int:
        """Pixels of what it takes that a token is wide."""
        return self.patch_embed.reduction

    def embed(self, x: Float[Tensor, "S B c H W"], steps: int) -> Float[Tensor, "T B C h w"]:
        """Make the tokens of T steps."""
        tokens: Tensor = checkpointed(self.patch_embed, x, steps, when=self.grad_checkpointing)
        return tokens

    def mix(self, x: Float[Tensor, "T B C h w"], block: nn.Module) -> Float[Tensor, "T B C h w"]:
        """Let one of the blocks mix the tokens of images."""
        steps, batch, width, *sides = x.shape
        grid = (sides[0], sides[1])
        tokens = x.permute(0, 1, 3, 4, 2).reshape(steps, batch, grid[0] * grid[1], width)
        tokens = checkpointed(block, tokens, grid, when=self.grad_checkpointing)
        images: Tensor = tokens.view(steps, batch, *grid, width).permute(0, 1, 4, 2, 3)
        return images

    def forward(self, x: Float[Tensor, "S B c H W"], steps: int) -> Float[Tensor, "T B C h w"]:
        """Embed T steps, or one that stands for all, and mix all ``steps``."""
        x = self.embed(x, steps)
        for block in self.blocks:
            x = self.mix(x, block)
        return x
