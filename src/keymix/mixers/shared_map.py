# SPDX-License-Identifier: Apache-2.0
"""A mixer without queries and keys: it takes another layer's attention map and mixes its heads."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import Grid, Queries, Site, Stage, check_stage, query_rows, take_rows
from keymix.mixers.re_attention import Norm, ReMixing
from keymix.mixers.site import as_grid
from keymix.ops import resample


class SharedMapAttention(ReMixing):
    r"""Attention by the map of an earlier layer: :math:`\mathrm{Norm}(\Theta^\top A)\, V`.

    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Eq. 5 and Table 3: A is the map of the last
    "unique" block (after its softmax); Θ, Norm and V are this layer's own, and it has no queries
    and keys. It cannot stand alone, so it has no name among the mixers: a model puts it in its
    later blocks and hands ``source`` to each call. Parameters: ``v``, ``theta [h, h]``,
    ``theta_bias [h]`` (as in ``re_attention``), ``norm``, ``proj``.

    Args:
        site: Where the mixer sits, with the heads of the map.
        head_dim: Width d of a head; ``dim / num_heads`` if None.
        qkv_bias: Bias of ``v``.
        proj_bias: Bias of the output projection.
        attn_drop: Probability of dropping an entry of the final map.
        proj_drop: Probability of dropping an output value.
        norm: ``"batch"`` (the paper's) or ``"layer"``, as in ``re_attention``.
        key_grid: Where the map's keys stay whatever grid the tokens take, as those of a layer with
            ``resize="pool_values"`` do; values are averaged there as that layer's are. None: keys
            lie where the tokens do.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[*, N, C]`` and source ``[*, h, N, M]`` -> ``[*, N, C]``; M = N without ``key_grid``.
    Cost: 2 N C^2 + N M C + h^2 N M multiply-adds, 2 C^2 + h^2 + 3 h weights besides biases.
    """

    mixer_name = "shared_map"
    roles = ("v",)
    joint = None
    collapse_remedy = "a shared map"

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm: Norm = "batch",
        key_grid: Grid | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            site,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            device=device,
            dtype=dtype,
        )
        self.key_grid = None if key_grid is None else as_grid("key_grid", key_grid)
        self._init_mixing(norm, theta_bias=True)

    @property
    def whole_maps(self) -> str:
        """Why no block of rows is formed: nothing is."""
        return "the map of another layer is there already"

    def _handed(self, source: Tensor | None, bias: Tensor | None) -> Tensor:
        if source is None:
            raise UserError(
                "a mixer that shares a map has none of its own: hand it source=, the map of the "
                "block it shares with"
            )
        if bias is not None:
            raise UserError("a shared map takes no bias; the layer that formed it took it")
        return source

    def forward(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
        source: Float[Tensor, "*batch h N M"] | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Mix the tokens by the map of another layer.

        Args:
            x: Tokens, the prefix first.
            grid: Grid (H, W) of these tokens, where it is not the site's.
            bias: Refused: the map is there already.
            source: The map, after its softmax.

        Raises:
            UserError: If there is no map, or a bias.
        """
        maps = self.mix_after(self._handed(source, bias), track=self.training)
        grid = self.resolve_grid(x, grid)
        values = self.inputs(x, grid)["v"]
        if self.key_grid is not None and grid is not None:
            prefix = self.site.num_prefix_tokens
            values = resample.pool(values, prefix, grid, self.key_grid)
        y = self.attn_drop(maps) @ values
        return self.output(y, x)

    def attention_map(
        self,
        x: Float[Tensor, "*batch N C"],
        grid: Grid | None = None,
        queries: Queries | None = None,
        stage: Stage = "softmax",
        bias: Tensor | None = None,
        source: Float[Tensor, "*batch h N M"] | None = None,
    ) -> Float[Tensor, "*batch h Q M"]:
        """Return rows of the map: the shared one, or what this layer makes of it.

        Args:
            x: Tokens as :meth:`forward` takes them.
            grid: Grid of these tokens, where it is not the site's.
            queries: Indices of the query tokens wanted (prefix tokens first); all if None.
            stage: ``"softmax"``: the map as it was handed on; ``"final"``: after mixing and norm,
                the map that multiplies V.
            bias: Refused, as in :meth:`forward`.
            source: The map that the forward pass was handed.

        Raises:
            UserError: If there is no map, a query is no token or the stage is unknown.
        """
        check_stage(stage)
        self.resolve_grid(x, grid)
        rows = query_rows(queries, x)
        maps = self._handed(source, bias)
        if stage == "softmax":
            return take_rows(maps, rows)
        if self.mixes_rows:
            return take_rows(self.mix_after(maps, track=False), rows)
        return self.mix_after(take_rows(maps, rows), track=False)
