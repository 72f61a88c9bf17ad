# SPDX-License-Identifier: Apache-2.0
"""Q-K channel attention: the queries of all tokens decide which channels of the keys stay."""

from __future__ import annotations

from types import MappingProxyType

from keymix.mixers.registry import register_mixer
from keymix.mixers.spiking import QKAttention, SpikingMixer


@register_mixer("qk_channel", aliases=("qkca",))
class QKChannelAttention(QKAttention):
    r"""Q-K channel attention: :math:`A_c = SN(\sum_j Q_j),\; X' = A_c \otimes K`.

    The sum runs over the N tokens, so that A_c is one spike per channel, which keeps or drops that
    channel of all keys. Output: :math:`X'' = SN(BN(X' W_o))`.

    Paper: QKFormer, https://arxiv.org/abs/2403.16552, Eq. 9, 11, 12. A channel's sum knows no
    heads: their number only says how A_c is arranged. With the defaults (LIF of tau 2, threshold
    0.5) one spike among the tokens is enough to fire. Parameters: ``q, q_bn, k, k_bn, proj,
    proj_bn``, and one number per neuron layer under ``neuron="plif"``.

    Options and what is refused: as in :class:`keymix.mixers.spiking.SpikingMixer`.

    Shape: x ``[T, *, N, C]`` -> the same, any N, spikes. Cost: 3 N C^2 multiply-adds per step for
    the projections; the attention adds N C numbers and masks as many. 3 C^2 + 7 C parameters.
    """

    about = (
        "Spiking attention without values: a channel's queries are summed over all tokens, "
        "and one spike keeps or drops that channel of the keys. Cost is linear in tokens. "
        "QKFormer, arXiv 2403.16552, Eq. 9, 11, 12."
    )

    sum_axis = -3
    spiking_roles = MappingProxyType({**SpikingMixer.spiking_roles, "attn_sn": "A_c"})
    why_no_map = "its attention is one spike per channel; mixer.spikes(x) returns it as A_c"
