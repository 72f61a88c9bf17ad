# SPDX-License-Identifier: Apache-2.0
"""Multi-head self-attention, the baseline of all four papers."""

from __future__ import annotations

from torch import Tensor

from keymix.mixers.base import redefines
from keymix.mixers.head_mixer import Roles
from keymix.mixers.map_mixer import LINEAR, MapMixer
from keymix.mixers.registry import register_mixer


@register_mixer("softmax", aliases=("mhsa",))
class SoftmaxAttention(MapMixer):
    r"""Multi-head self-attention: :math:`\mathrm{softmax}(Q K^\top / \sqrt d)\, V`.

    Paper: Attention is all you need, https://arxiv.org/abs/1706.03762, Eq. 1; the baseline in SKA
    Sec. 3, DeepViT Eq. 1 and KV Eq. 1. Parameters: ``qkv`` in the order q, k, v, and ``proj``.
    Options are those of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M. Cost: 4 N C^2 + 2 N M C multiply-adds.
    """

    family = "softmax"
    about = (
        "Multi-head self-attention: every token asks (query) and is asked (key), and the "
        "softmax of their products weighs the values. Attention is all you need, arXiv "
        "1706.03762, Eq. 1."
    )

    def fold(self) -> None:
        """Bring the factor of the logits into the queries."""
        super().fold()
        if not redefines(self, SoftmaxAttention, *LINEAR):
            self.scale_queries()

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Queries and keys, both computed."""
        return inputs["q"], inputs["k"]
