# SPDX-License-Identifier: Apache-2.0
"""What stands where a host's attention stood, and hands its call on to a mixer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import Place
from keymix.hosts.call_grid import CallGrid
from keymix.hosts.finishes import HeadFinish, Turn
from keymix.mixers.base import Grid, TokenMixer


class HostedMixer(nn.Module):
    """Stands where timm's attention stood, takes its call, and hands the tokens to the mixer.

    Args:
        mixer: The mixer.
        place: What the host itself says, for the next mixer put here.
        call: Knows the grid of the model's present call.
    """

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid) -> None:
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
        """Mix the tokens; a boolean mask (True: may attend) becomes an additive one.

        Raises:
            UserError: If asked for causal attention, or for a mask the mixer cannot honour.
        """
        if is_causal:
            raise UserError("mixers on images are not causal; call the model with is_causal=False")
        if attn_mask is None:
            out: Tensor = self.mixer(x, grid=self.grid_of(x))
            return out
        if not self.mixer.claims.maskable:
            raise UserError(f"mixer {self.mixer.mixer_name!r} cannot honour an attention mask")
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=x.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        masked: Tensor = self.mixer(x, grid=self.grid_of(x), bias=attn_mask)
        return masked


class HostedRope(HostedMixer):
    """Stands where rotary attention stood: the positions of a call reach queries and keys.

    Args:
        mixer: The mixer; its heads turn where its site says so.
        place: As :class:`HostedMixer` takes it.
        call: As :class:`HostedMixer` takes it.
    """

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid) -> None:
        super().__init__(mixer, place, call)
        self.turn = Turn()
        for module in mixer.modules():
            if isinstance(module, HeadFinish) and module.turn is not None:
                module.turn = self.turn

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
