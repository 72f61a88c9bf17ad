# SPDX-License-Identifier: Apache-2.0
"""Efficient attention: a softmax over the channels of queries, one over the tokens of keys."""

from __future__ import annotations

from torch import Tensor

from keymix.mixers.head_mixer import Roles
from keymix.mixers.kernel import KernelMixer
from keymix.mixers.registry import register_mixer


@register_mixer("efficient")
class EfficientAttention(KernelMixer):
    r"""Efficient attention: :math:`\rho_q(Q) (\rho_k(K)^\top V)`, two softmaxes apart.

    :math:`\rho_q` is a softmax over the channels of each query, :math:`\rho_k` one over the tokens
    of each channel of the keys, so that rows of the map sum to one. Paper: Efficient Attention,
    https://arxiv.org/abs/1812.01243, with its softmax normalisation. Parameters: ``qkv``, ``proj``.
    Differs: the paper projects by 1x1 convolutions, with keys narrower than values; here as a ViT.

    Args:
        site: Where the mixer sits.
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M.
    Cost: 4 N C^2 + 2 N C^2 / h multiply-adds.

    Raises:
        UserError: If a value is bad.
    """

    about = (
        "Queries are normalised over channels and keys over tokens, each by a softmax, and keys "
        "meet values first, so that cost grows linearly with tokens. Efficient Attention, arXiv "
        "1812.01243."
    )
    divides = False

    def features(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Softmax over channels of queries, over tokens of keys."""
        return inputs["q"].softmax(-1), inputs["k"].softmax(-2)
