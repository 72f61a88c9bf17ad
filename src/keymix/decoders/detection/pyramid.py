# SPDX-License-Identifier: Apache-2.0
"""Feature pyramids: maps of one width on a level for each size of instances.

Papers: FPN, https://arxiv.org/abs/1612.03144, Sec. 3 and 4; of a plain ViT the simple feature
pyramid of ViTDet, https://arxiv.org/abs/2203.16527, Sec. 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, FeaturePyramidNetwork

LEVELS = (4, 8, 16, 32)
"""Reductions of the levels P2 to P5, which instances are pooled from."""
COARSEST = 64
"""Reduction of P6, which proposals alone come from."""

Maps = dict[str, Tensor]
"""Levels of a pyramid by name, the finest first: those for instances are ``"0"``, ``"1"`` …"""


class Halved(ExtraFPNBlock):
    """Append levels: each every second position of the one before it, as FPN's P6 of its P5."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        """Return all levels and their names."""
        for index in range(self.count):
            results = [*results, F.max_pool2d(results[-1], kernel_size=1, stride=2)]
            names = [*names, f"pool{index}"]
        return results, names


class FeaturePyramid(FeaturePyramidNetwork):
    """FPN on the maps of a backbone with stages, by torchvision's.

    Args:
        chans: Channels of the backbone's maps, the finest first.
        reductions: How much smaller than the image they are; each is twice the one before it.
        width: Channels of every level.
        norm: Normalise the maps first, by a LayerNorm over channels each.
    """

    def __init__(
        self, chans: Sequence[int], reductions: Sequence[int], width: int, *, norm: bool
    ) -> None:
        more = (COARSEST // reductions[-1]).bit_length() - 1
        super().__init__([*chans], width, extra_blocks=Halved(max(more, 1)))
        self.reductions = tuple(reductions)
        self.norms = nn.ModuleList(LayerNorm2d(each) if norm else nn.Identity() for each in chans)

    def forward(self, x: Sequence[Float[Tensor, "B _ _ _"]]) -> Maps:
        """Return the levels, coarser ones behind those of the maps."""
        maps = [norm(each) for norm, each in zip(self.norms, x, strict=True)]
        found: Maps = super().forward({str(i): each for i, each in enumerate(maps)})
        return found


class SimplePyramid(nn.Module):
    """ViTDet's pyramid: every level comes from the one map of a plain ViT.

    Levels finer than the map come from transposed convolutions, which halve the channels, coarser
    ones from pooling; behind each a 1x1 and a 3x3 convolution with a LayerNorm over channels.

    Args:
        dim: Channels of the map.
        reduction: How much smaller than the image it is: 4, 8, 16 or 32.
        width: Channels of every level.
    """

    def __init__(self, dim: int, reduction: int, width: int) -> None:
        super().__init__()
        self.reductions = LEVELS
        self.levels = nn.ModuleList(_level(dim, reduction, to, width) for to in LEVELS)
        self.extra = Halved(1)

    def forward(self, x: Sequence[Float[Tensor, "B D h w"]]) -> Maps:
        """Return the levels, made of the last map."""
        results = [level(x[-1]) for level in self.levels]
        names = [str(i) for i in range(len(results))]
        results, names = self.extra(results, [], names)
        return dict(zip(names, results, strict=True))


def _level(dim: int, reduction: int, to: int, width: int) -> nn.Sequential:
    """Make what turns a map of a reduction into a level of another."""
    parts: list[nn.Module] = []
    while reduction > to:
        if parts:
            parts += [LayerNorm2d(dim), nn.GELU()]
        parts.append(nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2))
        dim, reduction = dim // 2, reduction // 2
    if to > reduction:
        parts.append(nn.MaxPool2d(to // reduction))
    return nn.Sequential(
        *parts,
        nn.Conv2d(dim, width, 1, bias=False),
        LayerNorm2d(width),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        LayerNorm2d(width),
    )
