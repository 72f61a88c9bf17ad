# SPDX-License-Identifier: Apache-2.0
"""Spike-driven self-attention: masks and additions alone, linear in tokens and channels."""

from __future__ import annotations

from types import MappingProxyType
from typing import Unpack

from jaxtyping import Float
from torch import Tensor, nn

from keymix.mixers.base import Site
from keymix.mixers.registry import register_mixer
from keymix.mixers.spiking import Note, SpikingMixer, SpikingOptions


@register_mixer("spike_driven", aliases=("sdsa",))
class SpikeDrivenSelfAttention(SpikingMixer):
    r"""Spike-driven self-attention: :math:`A = SN(\sum_j Q_j \otimes K_j),\; A \otimes V`.

    The sum of the products runs over the N tokens, so that A is one spike per channel, which keeps
    or drops that channel of all values.

    Paper: Spike-driven Transformer, https://arxiv.org/abs/2307.01694 (SDSA); QKFormer's Table 1
    (https://arxiv.org/abs/2403.16552) compares with it. Differs: that network adds potentials
    around its attention; here spikes come in and go out, as the other spiking mixers have it, so
    the output passes a neuron too. Parameters: ``q, q_bn, k, k_bn, v, v_bn, proj, proj_bn``,
    ``talking_heads.weight [h, h]`` with that option, and one number per neuron layer under
    ``neuron="plif"``.

    Options and what is refused: as in :class:`keymix.mixers.spiking.SpikingMixer`, and

    Args:
        site: As there.
        talking_heads: Mix the sums of the heads linearly before the neuron, starting at the
            identity. The published sizes of that network hold h^2 weights per block for it: its
            8-384 has 512 = 8 x 8 x 8 more than Spikformer's.
        shared: The options of that class.

    Shape: x ``[T, *, N, C]`` -> the same, any N, spikes. Cost: 4 N C^2 multiply-adds per step for
    the projections; the attention masks and adds N C numbers, then masks as many. 4 C^2 + 9 C
    parameters.
    """

    about = (
        "Spiking attention without products of matrices: queries and keys are multiplied "
        "elementwise and summed over tokens, and one spike keeps or drops each channel of the "
        "values. Spike-driven Transformer, arXiv 2307.01694."
    )

    roles = ("q", "k", "v")
    spiking_roles = MappingProxyType(
        {
            "q_sn": "Q",
            "k_sn": "K",
            "v_sn": "V",
            "attn_sn": "A_c",
            "proj": "SDSA'",
            "proj_sn": "SDSA",
        }
    )
    why_no_map = "its attention is one spike per channel; mixer.spikes(x) returns it as A_c"

    def __init__(
        self,
        site: Site,
        *,
        talking_heads: bool = False,
        **shared: Unpack[SpikingOptions],
    ) -> None:
        super().__init__(site, **shared)
        h = site.num_heads
        self.talking_heads: nn.Linear | None = None
        if talking_heads:
            weight = self.proj.weight
            self.talking_heads = nn.Linear(
                h, h, bias=False, device=weight.device, dtype=weight.dtype
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let every head speak for itself."""
        if self.talking_heads is not None:
            nn.init.eye_(self.talking_heads.weight)

    def gather(
        self, parts: dict[str, Float[Tensor, "T *batch N h d"]], note: Note
    ) -> Float[Tensor, "T *batch N h d"]:
        """Mask the values channel by channel."""
        q, k, v = (parts[role] for role in self.roles)
        sums = (q * k).sum(-3, keepdim=True)  # [T, *, 1, h, d]
        if self.talking_heads is not None:
            sums = self.talking_heads(sums.transpose(-2, -1)).transpose(-2, -1)
        attention: Tensor = self.attn_sn(sums)
        note(self.spiking_roles["attn_sn"], attention.transpose(-3, -2))
        return attention * v
