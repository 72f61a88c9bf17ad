# SPDX-License-Identifier: Apache-2.0
"""Cross-covariance attention: channels attend to channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Grid, Site, Traits
from keymix.mixers.head_mixer import HeadMixer, HeadOptions, Roles
from keymix.mixers.registry import register_mixer


@register_mixer("xca", aliases=("channel",))
class CrossCovarianceAttention(HeadMixer):
    r"""Cross-covariance attention: :math:`V\, \mathrm{softmax}(\hat K^\top \hat Q / \tau)`.

    Channels of a head take the place of tokens: :math:`\hat Q` and :math:`\hat K` have columns of
    length one over the tokens, and the map is d x d. Paper: XCiT,
    https://arxiv.org/abs/2106.09681, cross-covariance attention. Parameters: ``qkv``,
    ``temperature [h, 1, 1]``, which is 1/τ as in the published code and starts at 1, ``proj``.
    Differs: this is the attention alone; an XCiT block also has a local convolution of patches.

    Args:
        site: Where the mixer sits.
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N.
    Cost: 4 N C^2 + 2 N C^2 / h multiply-adds.

    Raises:
        UserError: If the keys lie on another grid than the tokens, or a value is bad.
    """

    family = "channels"
    about = (
        "Channels attend to channels by their covariance over the tokens, at a cost linear in "
        "tokens. XCiT, arXiv 2106.09681."
    )
    why_no_map = "its map is of channels, not of tokens"
    traits = Traits(maskable=False, named_only=True)

    @classmethod
    def needs_all_keys(cls, options: Mapping[str, Any]) -> bool:
        """Always: queries and keys meet over the tokens."""
        return True

    def __init__(self, site: Site, **shared: Unpack[HeadOptions]) -> None:
        if site.has_own_key_grid:
            raise UserError(
                f"mixer {self.mixer_name!r} multiplies queries and keys over the tokens, but here "
                f"keys lie on {site.key_grid} and tokens on {site.grid}; give the projections "
                "stride 1"
            )
        super().__init__(site, **shared)
        self.temperature = nn.Parameter(torch.empty(self.num_heads, 1, 1, **self.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at a temperature of 1."""
        nn.init.ones_(self.temperature)

    def no_weight_decay(self) -> set[str]:
        """The temperature."""
        return {"temperature"}

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Let each channel take from all, by their products over the tokens."""
        q, k = (F.normalize(inputs[role], dim=-2) for role in ("q", "k"))
        weights = (q.mT @ k * self.temperature).softmax(-1)
        return inputs["v"] @ weights.mT
