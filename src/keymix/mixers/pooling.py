# SPDX-License-Identifier: Apache-2.0
"""The control that averages neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import ImageMixer, Site
from keymix.mixers.registry import register_mixer
from keymix.mixers.site import coarser


@register_mixer("pooling")
class Pooling(ImageMixer):
    """Average of the neighbourhood minus the token itself, without parameters.

    Paper: MetaFormer is actually what you need for vision, https://arxiv.org/abs/2111.11418, Eq. 4;
    the subtraction takes the block's residual into account. Prefix tokens pass through.

    With ``key_grid`` it is the control of mixers with fewer keys than tokens: tokens are averaged
    onto that grid, as their values are, and interpolated back to their places, by no attention.

    Args:
        site: Where the mixer sits; it needs a grid.
        pool_size: Odd side of the neighbourhood, in tokens; border averages leave the outside out.
        key_grid: In place of a neighbourhood, the coarser grid: (height, width), ``"7x7"``, or a
            share of the tokens, ``"1/4"``.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any grid.

    Raises:
        UserError: If the site has no grid, the size is even, or both are given.
    """

    family = "controls"
    about = (
        "Replaces each token by the average of its neighbourhood minus itself; nothing is "
        "learned. MetaFormer, arXiv 2111.11418, Eq. 4."
    )

    why_grid = "averages neighbours"

    def __init__(
        self, site: Site, *, pool_size: int = 3, key_grid: Sequence[int] | str | None = None
    ) -> None:
        super().__init__(site)
        if pool_size < 1 or pool_size % 2 == 0:
            raise UserError(f"{pool_size=} must be odd and at least 1")
        self.pool_size, self.key_grid = pool_size, None
        if key_grid is not None and site.grid is not None:
            if pool_size != 3:
                raise UserError(
                    f"{key_grid=} averages onto a grid and {pool_size=} over neighbours; choose one"
                )
            self.key_grid = coarser("key_grid", key_grid, site.grid)

    def mix(self, image: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Average neighbours, or onto the grid and back, and take the tokens away."""
        if self.key_grid is not None:
            few = F.adaptive_avg_pool2d(image, self.key_grid)
            return F.interpolate(few, image.shape[-2:], mode="bilinear") - image
        k = self.pool_size
        return F.avg_pool2d(image, k, 1, k // 2, count_include_pad=False) - image
