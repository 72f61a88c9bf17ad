# SPDX-License-Identifier: Apache-2.0
"""What stands where a host's attention stood, and hands its call on to a mixer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import relative_positions
from keymix.hosts.base import Place
from keymix.hosts.call_grid import CALL_SIZE, CallGrid
from keymix.hosts.head_norms import turn_of
from keymix.hosts.timm_heads import as_tokens, in_format_of, input_format
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.map_mixer import MapMixer


def additive_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Turn a boolean mask (True: may attend) into a bias of x's dtype; others are one already."""
    if mask.dtype != torch.bool:
        return mask
    return x.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)


class GridMixer(nn.Module):
    """Hands tokens and their grid to a mixer, in blocks that know the grid, for images of any size.

    ``place`` is what the host itself says, for the next mixer put here.
    """

    def __init__(self, mixer: TokenMixer, place: Place) -> None:
        super().__init__()
        self.mixer = mixer
        self.place = place

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Mix tokens ``[B, N, C]`` of a grid."""
        out: Tensor = self.mixer(x, grid=grid)
        return out


class HostedMixer(nn.Module):
    """Stands where timm's attention stood, takes its call, and hands the tokens to the mixer.

    ``call`` knows the grid of the model's present call; ``place`` is as in `GridMixer`; ``before``
    is what stood there.
    """

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self.place = place
        self.call = call

    def grid_of(self, x: Tensor) -> Grid | None:
        """Return the grid of a call's tokens, None if they are the mixer's own or some dropped."""
        return self.call.of(x, self.place.site.num_prefix_tokens)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Mix the tokens; a boolean mask (True: may attend) becomes an additive one."""
        if is_causal:
            raise UserError("mixers on images are not causal; call the model with is_causal=False")
        if attn_mask is None:
            out: Tensor = self.mixer(x, grid=self.grid_of(x))
            return out
        if not self.mixer.claims.maskable:
            raise UserError(f"mixer {self.mixer.mixer_name!r} cannot honour an attention mask")
        masked: Tensor = self.mixer(x, grid=self.grid_of(x), bias=additive_mask(attn_mask, x))
        return masked


class HostedRope(HostedMixer):
    """Stands where rotary attention stood: the positions of a call reach queries and keys."""

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__(mixer, place, call, before)
        self.turn = turn_of(mixer)

    def forward(  # type: ignore[override]  # timm's rotary attention takes rope second
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Mix the tokens, queries and keys turned by ``rope``, as timm's attention takes it."""
        with self.turn.to(rope):
            return super().forward(x, attn_mask, is_causal)


class HostedPositions(HostedMixer):
    """Stands where attention with relative positions stood; these stay, by the names they have.

    Tokens come as they did, and go so. A mixer without a map has no use for positions, and they go.
    """

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__(mixer, place, call, before)
        self.input_format = input_format(before)
        kept = before if isinstance(mixer, MapMixer) else None
        setattr(self, CALL_SIZE, getattr(before, CALL_SIZE, None))
        self.rel_pos = getattr(kept, "rel_pos", None)
        table = getattr(kept, "relative_position_bias_table", None)
        self.register_parameter("relative_position_bias_table", table)
        index = getattr(kept, "relative_position_index", None)
        self.register_buffer("relative_position_index", index, persistent=False)

    def forward(  # type: ignore[override]  # timm's blocks call it
        self,
        x: Tensor,
        shared_rel_pos: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens, relative positions added to the logits of a mixer that has some.

        Those of all blocks come with the call, by the names of timm's ViTs and of its BEiT.
        """
        shared = shared_rel_pos if shared_rel_pos_bias is None else shared_rel_pos_bias
        has = isinstance(self.mixer, MapMixer)
        tokens, bias = as_tokens(self, x), relative_positions(self, shared) if has else None
        return in_format_of(self, self.mixer(tokens, grid=self.grid_of(tokens), bias=bias), x)
