# SPDX-License-Identifier: Apache-2.0
"""The control that averages neighbours."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import ImageMixer, Site
from keymix.mixers.registry import register_mixer


@register_mixer("pooling")
class Pooling(ImageMixer):
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

    about = (
        "Replaces each token by the average of its neighbourhood minus itself; nothing is "
        "learned. MetaFormer, arXiv 2111.11418, Eq. 4."
    )

    why_grid = "averages neighbours"

    def __init__(self, site: Site, *, pool_size: int = 3) -> None:
        super().__init__(site)
        if pool_size < 1 or pool_size % 2 == 0:
            raise UserError(f"{pool_size=} must be odd and at least 1")
        self.pool_size = pool_size

    def mix(self, image: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Average neighbours and take the tokens away."""
        k = self.pool_size
        return F.avg_pool2d(image, k, 1, k // 2, count_include_pad=False) - image
