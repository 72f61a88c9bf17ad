# SPDX-License-Identifier: Apache-2.0
"""The control that mixes nothing."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from keymix.mixers.base import Grid, TokenMixer, Traits
from keymix.mixers.registry import register_mixer


@register_mixer("identity")
class Identity(TokenMixer):
    """No mixing at all: y = x. What a model reaches with it, it reaches without attention.

    Paper: MetaFormer Baselines for Vision, https://arxiv.org/abs/2210.13452 (IdentityFormer).
    No parameters. Behind a class token the model is blind, so models read out by the mean.

    Shape: x ``[*, N, C]`` -> the same.
    """

    family = "controls"
    about = (
        "Mixes no tokens: the output is the input. What a model reaches with it, it reaches "
        "without attention. MetaFormer Baselines for Vision, arXiv 2210.13452."
    )

    traits = Traits(domain="any", mixes_prefix=False, control=True)

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Return the tokens."""
        self.resolve_grid(x, grid)
        return x
