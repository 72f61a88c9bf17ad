# SPDX-License-Identifier: Apache-2.0
"""Agent attention: a few agent tokens gather from the keys and answer the queries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import GridNeeded, UserError
from keymix.mixers.base import Grid, Site, Traits, split_prefix, take_rows, to_image, to_tokens
from keymix.mixers.head_mixer import HeadMixer, HeadOptions, Roles
from keymix.mixers.registry import register_mixer
from keymix.mixers.site import KeyGrid, coarser
from keymix.ops import resample
from keymix.ops.attention import sdpa


@register_mixer("agent")
class AgentAttention(HeadMixer):
    r"""Agent attention: :math:`\sigma(Q A^\top)\, \sigma(A K^\top)\, V + \mathrm{DWC}(V)`.

    :math:`\sigma` is the softmax of scaled logits; the agents A are averages of the queries of
    patches on a coarser grid; DWC is a depthwise 3x3 convolution of the patches' values. Paper:
    Agent Attention, https://arxiv.org/abs/2312.08874, the agent attention module. Parameters:
    ``qkv``, ``dwc`` where there is one, ``proj``.
    Differs: without the paper's agent biases, which are tied to a grid.

    Args:
        site: Where the mixer sits; it needs a grid.
        agents: Grid of the agents: (height, width), ``"7x7"`` as in the paper's models of plain
            ViT, or a share of patches, ``"1/4"``. Sides are at most those of the tokens.
        dwc: Whether values are convolved too.
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any grid.
    Cost: 4 N C^2 + 2 (N + M) n C + 9 N C multiply-adds, n the agents.

    Raises:
        UserError: If the site has no grid, values of a convolution lie on another, or a value is
            bad.
    """

    family = "low rank"
    about = (
        "A few agent tokens, averages of queries, gather from all tokens and answer the queries. "
        "Agent Attention, arXiv 2312.08874."
    )
    traits = Traits(maskable=False, permutation="positional", named_only=True)
    tied_to_grid = False

    def __init__(
        self,
        site: Site,
        *,
        agents: KeyGrid = "7x7",
        dwc: bool = True,
        **shared: Unpack[HeadOptions],
    ) -> None:
        if site.grid is None:
            raise GridNeeded(
                f"mixer {self.mixer_name!r} averages queries on their grid and so needs grid=(H, W)"
            )
        if dwc and site.has_own_key_grid:
            raise UserError(f"{dwc=} needs as many values as tokens; this site has fewer")
        super().__init__(site, **shared)
        self.agents, width = agents, self.num_heads * self.head_dim
        coarser("agents", agents, site.grid)  # or refuse what is no grid
        self.dwc: nn.Conv2d | None = None
        if dwc:
            self.dwc = nn.Conv2d(width, width, 3, padding=1, groups=width, **self.factory)

    @classmethod
    def needs_all_keys(cls, options: Mapping[str, Any]) -> bool:
        """With the convolution of values, which is added token by token."""
        return bool(options.get("dwc", True))

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer with heads, the agents and whether values are convolved."""
        own = {"agents": self.agents, "dwc": self.dwc is not None}
        return {**super().transfer_options(), **own}

    def neutralize(self, copied: Collection[str]) -> set[str]:
        """Let the convolution add nothing at first, unless it was copied."""
        if self.dwc is None or "dwc.weight" in copied:
            return set()
        nn.init.zeros_(self.dwc.weight)
        assert self.dwc.bias is not None  # built with one
        nn.init.zeros_(self.dwc.bias)
        return {"dwc.weight", "dwc.bias"}

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Let agents gather, then queries ask them."""
        agents, scale, v = self._agents(inputs["q"], grid), self.head_dim**-0.5, inputs["v"]
        gathered = sdpa.attention(agents, inputs["k"], v, scale=scale)
        y = sdpa.attention(inputs["q"], agents, gathered, scale=scale)
        if self.dwc is None:
            return y
        prefix, patches = split_prefix(v.transpose(-3, -2).flatten(-2), self.site.num_prefix_tokens)
        near = to_tokens(self.dwc(to_image(patches, self._grid(grid))), patches.shape[:-2])
        added = torch.cat((torch.zeros_like(prefix), near), -2)
        heads = added.reshape(*added.shape[:-1], self.num_heads, self.head_dim)
        return y + heads.transpose(-3, -2)

    def form_map(
        self, inputs: Roles, grid: Grid | None, rows: Tensor | None = None
    ) -> Float[Tensor, "*batch h Q M"]:
        """Form the product of both maps, without the convolution."""
        agents, scale = self._agents(inputs["q"], grid), self.head_dim**-0.5
        ask = (take_rows(inputs["q"], rows) @ agents.mT * scale).softmax(-1)
        gather = (agents @ inputs["k"].mT * scale).softmax(-1)
        made: Tensor = ask @ gather
        return made

    def _agents(self, q: Tensor, grid: Grid | None) -> Tensor:
        there = self._grid(grid)
        patches = split_prefix(q, self.site.num_prefix_tokens)[1]
        return resample.pool(patches, 0, there, coarser("agents", self.agents, there))

    def _grid(self, grid: Grid | None) -> Grid:
        there = grid or self.site.grid
        assert there is not None  # __init__ refuses a site without
        return there
