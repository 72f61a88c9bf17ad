# SPDX-License-Identifier: Apache-2.0
"""Spiking self-attention: products of spikes without a softmax, in the cheaper of two orders."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Literal, Unpack

from jaxtyping import Float
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import Site
from keymix.mixers.registry import register_mixer
from keymix.mixers.spiking import Note, SpikingMixer, SpikingOptions

Order = Literal["auto", "quadratic", "linear"]


@register_mixer("spiking_self", aliases=("ssa",))
class SpikingSelfAttention(SpikingMixer):
    r"""Spiking self-attention: :math:`SSA' = SN(Q K^\top V \cdot s)`, no softmax.

    Output: :math:`SSA = SN(BN(SSA' W_o))`. Without a softmax the product may be taken in either
    order, :math:`(Q K^\top) V` or :math:`Q (K^\top V)`. Spikes make every entry a whole number, so
    both orders are equal to the last bit as long as these numbers are exact, up to 2^24 in float32
    (they are at most N d), up to 256 in bfloat16.

    Paper: Spikformer, https://arxiv.org/abs/2209.15425, as QKFormer has it,
    https://arxiv.org/abs/2403.16552, Eq. 6 to 8. Parameters: ``q, q_bn, k, k_bn, v, v_bn, proj,
    proj_bn``, and one number per neuron layer under ``neuron="plif"``.

    Options and what is refused: as in :class:`keymix.mixers.spiking.SpikingMixer`, and

    Args:
        site: As there.
        scale: Factor s, above 0; 0.125 in the published networks of all widths.
        order: Which product comes first: ``"quadratic"`` Q K^T, 2 N^2 C multiply-adds and an N x N
            map per head; ``"linear"`` K^T V, 2 N C d; ``"auto"`` the one with fewer.
        shared: The options of that class.

    Shape: x ``[T, *, N, C]`` -> the same, any N, spikes. Cost: 4 N C^2 + 2 N C min(N, d)
    multiply-adds per step; 4 C^2 + 9 C parameters.
    """

    about = (
        "Self-attention of spikes: products of query, key and value without a softmax, "
        "followed by a spiking neuron. Spikformer, arXiv 2209.15425."
    )

    roles = ("q", "k", "v")
    spiking_roles = MappingProxyType(
        {"q_sn": "Q", "k_sn": "K", "v_sn": "V", "attn_sn": "SSA'", "proj_sn": "SSA"}
    )
    why_no_map = (
        "without a softmax, the rows of Q K^T count spikes that two tokens share and sum to no "
        "fixed number; mixer.spikes(x) returns Q and K"
    )

    def __init__(
        self,
        site: Site,
        *,
        scale: float = 0.125,
        order: Order = "auto",
        **shared: Unpack[SpikingOptions],
    ) -> None:
        super().__init__(site, **shared)
        if not 0 < scale < math.inf:
            raise UserError(f"{scale=} must be a number above 0")
        self.scale = float(scale)
        self.order = order

    def order_for(self, tokens: int) -> Literal["quadratic", "linear"]:
        """Return the order of the products for that many tokens.

        Args:
            tokens: Tokens N.
        """
        if self.order != "auto":
            return self.order
        return "linear" if self.head_dim < tokens else "quadratic"

    def gather(
        self, parts: dict[str, Float[Tensor, "T *batch N h d"]], note: Note
    ) -> Float[Tensor, "T *batch N h d"]:
        """Multiply the three and let the neurons fire."""
        q, k, v = (parts[role].transpose(-3, -2) for role in self.roles)  # [T, *, h, N, d]
        keys = k.transpose(-2, -1)  # .mT is not known to exporters
        linear = self.order_for(q.shape[-2]) == "linear"
        products = q @ (keys @ v) if linear else q @ keys @ v
        spikes: Tensor = self.attn_sn(products * self.scale)
        return spikes.transpose(-3, -2)
