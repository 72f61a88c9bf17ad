# SPDX-License-Identifier: Apache-2.0
"""Linear attention: the feature map elu(x) + 1 in place of the softmax."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from keymix.mixers.head_mixer import Roles
from keymix.mixers.kernel import KernelMixer
from keymix.mixers.registry import register_mixer


@register_mixer("linear")
class LinearAttention(KernelMixer):
    r"""Linear attention: :math:`D^{-1} \varphi(Q) (\varphi(K)^\top V)`, of features elu + 1.

    D has the sums of rows of :math:`\varphi(Q)\, \varphi(K)^\top`. Paper: Transformers are RNNs,
    https://arxiv.org/abs/2006.16236, Eq. 4 to 7. Parameters: ``qkv``, ``proj``.

    Args:
        site: Where the mixer sits.
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M.
    Cost: 4 N C^2 + 2 N C^2 / h + N C multiply-adds.

    Raises:
        UserError: If a value is bad.
    """

    about = (
        "Weights are products of positive features elu(x) + 1 of query and key, without a softmax, "
        "so that cost grows linearly with tokens. Transformers are RNNs, arXiv 2006.16236, Eq. 4."
    )

    def features(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Take elu + 1 of queries and keys."""
        return F.elu(inputs["q"]) + 1, F.elu(inputs["k"]) + 1
