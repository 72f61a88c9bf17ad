# SPDX-License-Identifier: Apache-2.0
"""Q-K token attention: each token keeps or loses the keys of a head, as its own queries say."""

from __future__ import annotations

from types import MappingProxyType

from keymix.mixers.base import Traits
from keymix.mixers.registry import register_mixer
from keymix.mixers.spiking import QKAttention, SpikingMixer


@register_mixer("qk_token", aliases=("qkta",))
class QKTokenAttention(QKAttention):
    r"""Q-K token attention: :math:`A_t = SN(\sum_i Q_i),\; X' = A_t \otimes K`.

    The sum runs over the d channels of a head, so that A_t is one spike per token and head, which
    keeps or drops the head's keys of that token. Output: :math:`X'' = SN(BN(X' W_o))`.

    Paper: QKFormer, https://arxiv.org/abs/2403.16552, Eq. 9, 10, 12; heads as the text below Eq.
    12 says. No token receives anything from another; only the statistics of the norms and the
    model around it join them. With the defaults (LIF of tau 2, threshold 0.5) one spike among the
    queries is enough to fire, so A_t says whether the head's queries are silent. Parameters:
    ``q, q_bn, k, k_bn, proj, proj_bn``, and one number per neuron layer under ``neuron="plif"``.

    Options and what is refused: as in :class:`keymix.mixers.spiking.SpikingMixer`.

    Shape: x ``[T, *, N, C]`` -> the same, any N, spikes. Cost: 3 N C^2 multiply-adds per step for
    the projections; the attention adds N C numbers and masks as many. 3 C^2 + 7 C parameters.
    """

    about = (
        "Spiking attention without values: a token's queries are summed over the channels of "
        "a head, and one spike keeps or drops the token's keys. Cost is linear in tokens. "
        "QKFormer, arXiv 2403.16552, Eq. 9, 10, 12."
    )

    traits = Traits(domain="spiking", maskable=False, mixes_prefix=False)
    sum_axis = -1
    spiking_roles = MappingProxyType({**SpikingMixer.spiking_roles, "attn_sn": "A_t"})
    token_mask = "A_t"
    why_no_map = "its attention is one spike per token and head; mixer.spikes(x) returns it as A_t"
