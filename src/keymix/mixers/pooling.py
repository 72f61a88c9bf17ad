# SPDX-License-Identifier: Apache-2.0
"""The control that averages neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keymix.errors import GridNeeded, UserError
from keymix.mixers.base import Grid, Site, TokenMixer, Traits, split_prefix, to_image, to_tokens
from keymix.mixers.registry import register_mixer


@register_mixer("pooling")
class Pooling(TokenMixer):
    """Average of the neighbourhood minus the token itself, without parameters.

    Paper: MetaFormer is actually what you need for vision, https://arxiv.org/abs/2111.11418, Eq. 4;
    the subtraction takes the block's residual into account. Prefix tokens pass through.

    Args:
        site: Where the mixer sits; it needs a grid.
        pool_size: Odd side of the neighbourhood, in tokens; border averages leave the outside out.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any grid.

    Raises:
        UserError: If the site has no grid or the size is even.
    """

    traits = Traits(mixes_prefix=False, maskable=False, permutation="positional", control=True)

    def __init__(self, site: Site, *, pool_size: int = 3) -> None:
        super().__init__(site)
        if site.grid is None:
            raise GridNeeded("mixer 'pooling' averages neighbours and so needs grid=(H, W)")
        if pool_size < 1 or pool_size % 2 == 0:
            raise UserError(f"{pool_size=} must be odd and at least 1")
        self.pool_size = pool_size

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Pool the patch tokens on their grid."""
        grid = self.resolve_grid(x, grid)
        if grid is None:  # a Pooling site has a grid
            raise UserError("pooling needs a grid")
        prefix, patches = split_prefix(x, self.site.num_prefix_tokens)
        image = to_image(patches, grid)
        k = self.pool_size
        pooled = F.avg_pool2d(image, k, 1, k // 2, count_include_pad=False) - image
        tokens = to_tokens(pooled, patches.shape[:-2])
        return torch.cat((prefix, tokens), -2) if self.site.num_prefix_tokens else tokens
