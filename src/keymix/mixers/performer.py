# SPDX-License-Identifier: Apache-2.0
"""Performer: the softmax kernel by positive random features (FAVOR+)."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from keymix.errors import check_positive
from keymix.mixers.base import Site
from keymix.mixers.head_mixer import HeadOptions, Roles
from keymix.mixers.kernel import KernelMixer
from keymix.mixers.registry import register_mixer


@register_mixer("performer", aliases=("favor",))
class PerformerAttention(KernelMixer):
    r"""FAVOR+: :math:`D^{-1} \varphi(Q) (\varphi(K)^\top V)` whose mean is softmax attention.

    With :math:`x' = x\, d^{-1/4}` and m random directions w,
    :math:`\varphi(x) = m^{-1/2} \exp(w^\top x' - \lVert x' \rVert^2 / 2)`, so that the mean of
    :math:`\varphi(q)^\top \varphi(k)` is :math:`\exp(q^\top k / \sqrt d)`. Paper: Rethinking
    Attention with Performers, https://arxiv.org/abs/2009.14794, Lemma 1 (the first of its two
    positive features) and Sec. 2.4 (orthogonal directions). Parameters: ``qkv``, ``proj``; buffer
    ``directions [m, d]``, which is saved.
    Differs: directions are drawn once, not again while training; nothing is added to features,
    which their largest exponent keeps from overflow.

    Args:
        site: Where the mixer sits.
        num_features: Random features m a head; d ln d, at least d, if None.
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M.
    Cost: 4 N C^2 + 4 N m C + N m h multiply-adds.

    Raises:
        UserError: If a value is bad.
    """

    about = (
        "Approximates softmax attention by positive random features of queries and keys, at a cost "
        "linear in tokens. Performer, arXiv 2009.14794, Lemma 1."
    )
    directions: Tensor

    def __init__(
        self, site: Site, *, num_features: int | None = None, **shared: Unpack[HeadOptions]
    ) -> None:
        check_positive(num_features=1 if num_features is None else num_features)
        super().__init__(site, **shared)
        d = self.head_dim
        count = num_features or max(d, round(d * math.log(d)))
        self.register_buffer("directions", torch.empty(count, d, **self.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw directions: rows of random orthogonal matrices, as long as Gaussian vectors."""
        count, d = self.directions.shape
        if self.directions.is_meta:
            return
        with torch.no_grad():
            for start in range(0, count, d):
                part = self.directions[start : start + d]
                made = torch.nn.init.orthogonal_(torch.empty(d, d))[: len(part)]
                part.copy_(made * torch.randn(len(part), d).norm(dim=1, keepdim=True))

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer with heads and the number of features."""
        return {**super().transfer_options(), "num_features": len(self.directions)}

    def features(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Positive features; factors common to a query, or to all keys, cancel and are left out."""
        q, k = (self._exponents(inputs[role]) for role in ("q", "k"))
        q = q - q.detach().amax(-1, keepdim=True)
        k = k - k.detach().amax((-2, -1), keepdim=True)
        return q.exp(), k.exp()

    def _exponents(self, x: Tensor) -> Tensor:
        x = x * self.head_dim**-0.25
        return x @ self.directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2
