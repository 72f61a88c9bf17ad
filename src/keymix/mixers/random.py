# SPDX-License-Identifier: Apache-2.0
"""The control that mixes by chance: a fixed random map."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keymix.errors import GridNeeded, UserError
from keymix.mixers.base import (
    Grid,
    Queries,
    Site,
    Stage,
    TokenMixer,
    Traits,
    check_stage,
    query_rows,
    take_rows,
)
from keymix.mixers.registry import register_mixer


@register_mixer("random")
class RandomMixing(TokenMixer):
    """Mix by a fixed random map: y = softmax(R) x with R drawn once from U(0, 1), never trained.

    Paper: MetaFormer Baselines for Vision, https://arxiv.org/abs/2210.13452 (RandFormer). The map
    ``random_matrix [N, N]`` is a buffer (saved, not trained), shared by all channels, and covers
    prefix tokens too.

    Args:
        site: Where the mixer sits; it needs a grid, which fixes N.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]`` with the site's N. Cost: N^2 C multiply-adds.

    Raises:
        UserError: If the site has no grid.
    """

    family = "controls"
    about = (
        "Mixes tokens by one fixed random map that is never trained. MetaFormer Baselines for "
        "Vision, arXiv 2210.13452."
    )

    traits = Traits(maskable=False, permutation="positional", control=True)
    random_matrix: Tensor

    def __init__(self, site: Site, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(site)
        if site.grid is None:
            raise GridNeeded("mixer 'random' draws an N x N map and so needs grid=(H, W)")
        n = site.num_tokens
        self.register_buffer("random_matrix", torch.empty(n, n, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a new map."""
        with torch.no_grad():
            self.random_matrix.copy_(torch.rand_like(self.random_matrix).softmax(-1))

    def _check(self, x: Tensor, grid: Grid | None) -> None:
        self.resolve_grid(x, grid)
        if x.shape[-2] != self.site.num_tokens:
            raise UserError(
                f"the random map was drawn for {self.site.num_tokens} tokens and got {x.shape[-2]}"
            )

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Multiply the tokens by the fixed map."""
        self._check(x, grid)
        return self.random_matrix.to(x.dtype) @ x

    def attention_map(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        queries: Queries | None = None,
        stage: Stage = "softmax",
        bias: Tensor | None = None,
    ) -> Float[Tensor, "*batch 1 Q N"]:
        """Return rows of the fixed map, as one head."""
        self._check(x, grid)
        check_stage(stage)
        a = take_rows(self.random_matrix, query_rows(queries, x))
        return a.expand(*x.shape[:-2], 1, *a.shape)
