# SPDX-License-Identifier: Apache-2.0
"""Spatial-reduction attention: keys and values of tokens averaged onto a coarser grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from keymix.errors import GridNeeded
from keymix.mixers.base import Grid, Site, Traits, redefines
from keymix.mixers.head_mixer import KeyPool, Roles
from keymix.mixers.map_mixer import LINEAR, LogitOptions, MapMixer
from keymix.mixers.registry import register_mixer
from keymix.mixers.site import KeyGrid, coarser
from keymix.ops import resample


@register_mixer("spatial_reduction", aliases=("sra",))
class SpatialReductionAttention(MapMixer):
    r"""Spatial reduction: :math:`\mathrm{softmax}(s\, Q K^\top + \log n)\, V`, of averaged tokens.

    :math:`K = P(x) W_K` and :math:`V = P(x) W_V`, where P averages patch tokens onto ``key_grid``
    and leaves prefix tokens as they are; :math:`n_m` is the number of tokens behind key m. A linear
    map of an average is the average of linear maps, so the projections of softmax attention serve
    as they are.

    Paper: Pyramid Vision Transformer, https://arxiv.org/abs/2102.12122, Sec. 3.3; by averages as
    in PVT v2, https://arxiv.org/abs/2106.13797, Sec. 3.1 (linear SRA), and, without training, in
    ToDo, https://arxiv.org/abs/2402.13573. The term log n is the proportional attention of Token
    Merging, https://arxiv.org/abs/2210.09461, Sec. 3.
    Differs: nothing is learned in the reduction (PVT: a strided convolution and a norm); cells may
    be uneven, and a token in two cells counts half in each. A bias of the host becomes the log of
    its mean exponential over a cell; norms of keys see averaged keys; rotary codes are averaged
    over a cell, which is the code of its centre, shorter by how far it turns within.

    Args:
        site: Where the mixer sits.
        key_grid: (height, width) of the keys' grid, ``"7x7"``, or a share of the tokens, ``"1/4"``.
            It follows the tokens to another grid.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer` but ``mask_diagonal``.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any grid. Cost: 2 (N + M) C^2 + 2 N M C multiply-adds,
    4 C^2 weights.

    Raises:
        UserError: If the site has no grid, or a value is bad.
    """

    family = "low rank"
    about = (
        "Softmax attention whose keys and values are of tokens averaged onto a coarser grid. "
        "Pyramid Vision Transformer, arXiv 2102.12122, Sec. 3.3; by averages, arXiv 2106.13797."
    )
    traits = Traits(maskable=False, permutation="positional", named_only=True)
    tied_to_grid = False
    joint = None

    def __init__(
        self, site: Site, *, key_grid: KeyGrid = "1/4", **shared: Unpack[LogitOptions]
    ) -> None:
        if site.grid is None:
            raise GridNeeded(
                f"mixer {self.mixer_name!r} averages tokens on their grid and so needs grid=(H, W)"
            )
        super().__init__(site, **shared)
        self.chosen_key_grid = key_grid
        self.key_grid_for(site.grid)  # or refuse what is no grid

    def key_grid_for(self, grid: Grid, count: int | None = None) -> Grid:
        """Return where the keys of tokens on a grid lie."""
        return coarser("key_grid", self.chosen_key_grid, self._source(grid))

    def _source(self, grid: Grid) -> Grid:
        """Where tokens lie before they are averaged: on the grid, or where ``project`` put them."""
        return (None if self.project is None else self.site.on(grid).key_grid) or grid

    def _cells(self, grid: Grid | None) -> tuple[Grid, Grid] | None:
        """The grids before and after the average; None where they are one."""
        grid = grid or self.site.grid
        assert grid is not None  # __init__ refuses a site without
        pair = self._source(grid), self.key_grid_for(grid)
        return None if pair[0] == pair[1] else pair

    @property
    def claims(self) -> Traits:
        """The traits; a mask says nothing of keys that each stand for several tokens."""
        whole = self._cells(None) is None and self.talking_pre is None
        return replace(self.traits, maskable=whole)

    @property
    def zero_gradients(self) -> frozenset[str]:
        """The bias of keys that nothing norms: it shifts all logits of a query alike."""
        finished = self.post_projection is not None and "k" in self.post_projection
        bias = self.get_submodule("k").bias
        return frozenset() if finished or bias is None else frozenset({"k.bias"})

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any map mixer and the grid of the keys."""
        return {**super().transfer_options(), "key_grid": self.chosen_key_grid}

    def fold(self) -> None:
        """Bring the factor of the logits into the queries."""
        super().fold()
        if not redefines(self, SpatialReductionAttention, *LINEAR):
            self.scale_queries()

    def sources(self, x: Float[Tensor, "*batch N C"], grid: Grid | None) -> Roles:
        """Return what each role is projected from; keys and values from averaged tokens."""
        sources, cells = super().sources(x, grid), self._cells(grid)
        if cells is None:
            return sources
        prefix = self.site.num_prefix_tokens
        keys = resample.pool(sources["k"], prefix, *cells)
        values = keys if self.project is None else resample.pool(sources["v"], prefix, *cells)
        return {**sources, "k": keys, "v": values}

    def key_pool(self, grid: Grid | None) -> KeyPool | None:
        """Return what averages rows of the patch tokens onto the keys' grid."""
        cells = self._cells(grid)
        if cells is None:
            return None
        return partial(resample.pool, prefix=0, old=cells[0], new=cells[1])

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Queries and keys, both computed."""
        return inputs["q"], inputs["k"]

    def own_bias(self, inputs: Roles, grid: Grid | None, rows: Tensor | None) -> Tensor | None:
        """Return the log of the number of tokens behind each key; None where it is one number."""
        cells, prefix = self._cells(grid), self.site.num_prefix_tokens
        if cells is None:
            return None
        counts = resample.counts(*cells)
        if not prefix and max(counts) - min(counts) < 1e-9:
            return None
        return inputs["k"].new_tensor([[1.0] * prefix + counts]).log()

    def _added(
        self, inputs: Roles, grid: Grid | None, bias: Tensor | None, rows: Tensor | None
    ) -> Tensor | None:
        if bias is not None and bias.ndim and bias.shape[-1] not in (1, inputs["k"].shape[-2]):
            bias = self._bias_of_cells(bias, grid)
        return super()._added(inputs, grid, bias, rows)

    def _bias_of_cells(self, bias: Tensor, grid: Grid | None) -> Tensor:
        """Return the log of the mean exponential of a bias of tokens over each cell."""
        cells, prefix = self._cells(grid), self.site.num_prefix_tokens
        assert cells is not None  # there are fewer keys than the bias has columns
        down, across = (
            bias.new_tensor(resample.shares(old, new)) for old, new in zip(*cells, strict=True)
        )
        mean = torch.kron(down, across)
        first, patches = bias[..., :prefix], bias[..., prefix:]
        most = patches.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
        means = (patches - most).exp() @ (mean / mean.sum(-1, keepdim=True)).mT
        return torch.cat((first, means.log() + most), -1)

    def _keys(self, shape: Sequence[int] | None) -> int:
        """Number of keys for tokens of a shape, as far as the site's grid says it."""
        assert self.site.grid is not None  # __init__ refuses a site without
        return self.site.num_prefix_tokens + math.prod(self.key_grid_for(self.site.grid))
