# SPDX-License-Identifier: Apache-2.0
"""Differential attention: the difference of two softmax maps."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Grid, Site, Traits, take_rows
from keymix.mixers.head_mixer import HeadMixer, HeadOptions, Roles
from keymix.mixers.registry import register_mixer
from keymix.ops.attention import sdpa


@register_mixer("differential", aliases=("diff",))
class DifferentialAttention(HeadMixer):
    r"""Differential attention: :math:`(A_1 - \lambda A_2)\, V`, two softmax maps.

    :math:`A_i = \mathrm{softmax}(s Q_i K_i^\top)`. Queries and keys of a head are halves,
    :math:`Q = [Q_1; Q_2]`, of d/2 channels each, with :math:`s = (d/2)^{-1/2}`. Four vectors give
    :math:`\lambda = e^{q_1 \cdot k_1} - e^{q_2 \cdot k_2} + \lambda_0`. What a head returns passes
    an RMS norm and is multiplied by :math:`1 - \lambda_0`. Paper: Differential Transformer,
    https://arxiv.org/abs/2410.05258, Eq. 1 to 3. Parameters: ``qkv``, ``lambdas [4, d/2]``
    (q1, k1, q2, k2), which start at N(0, 0.1), ``norm``, ``proj``.
    Differs: the paper halves the number of heads to keep d; here a head of d has halves of d/2.

    Args:
        site: Where the mixer sits.
        lambda_init: :math:`\lambda_0`, one number for all layers (the paper's 0.8 - 0.6 e^(-0.3 l)
            is 0.2 in the first layer and near 0.8 from the tenth on).
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M.
    Cost: 4 N C^2 + 2 N M C multiply-adds (fused, where each map meets V: 4 N C^2 + 4 N M C).

    Raises:
        UserError: If heads have an odd width, or a value is bad.
    """

    family = "softmax"
    about = (
        "Subtracts a second softmax map from the first, so that what both attend to cancels. "
        "Differential Transformer, arXiv 2410.05258, Eq. 1."
    )
    traits = Traits(maskable=False, named_only=True)

    def __init__(
        self, site: Site, *, lambda_init: float = 0.8, **shared: Unpack[HeadOptions]
    ) -> None:
        super().__init__(site, **shared)
        if self.head_dim % 2:
            raise UserError(
                f"mixer {self.mixer_name!r} halves its heads, whose width is {self.head_dim}: give "
                "an even head_dim="
            )
        if not 0 < lambda_init < 1:
            raise UserError(f"{lambda_init=} must lie between 0 and 1")
        self.lambda_init = lambda_init
        self.lambdas = nn.Parameter(torch.empty(4, self.head_dim // 2, **self.factory))
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-5, **self.factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors of lambda."""
        nn.init.normal_(self.lambdas, std=0.1)

    def no_weight_decay(self) -> set[str]:
        """The vectors of lambda."""
        return {"lambdas"}

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer with heads and the first lambda."""
        return {**super().transfer_options(), "lambda_init": self.lambda_init}

    def share(self) -> Tensor:
        """Return lambda, the weight of the second map."""
        q1, k1, q2, k2 = self.lambdas
        share: Tensor = (q1 @ k1).exp() - (q2 @ k2).exp() + self.lambda_init
        return share

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Take the difference of both halves' attention, and norm it."""
        if self.backend == "reference":
            y = self.form_map(inputs, grid) @ inputs["v"]
        else:
            scale = (self.head_dim / 2) ** -0.5
            halves = zip(inputs["q"].chunk(2, -1), inputs["k"].chunk(2, -1), strict=True)
            one, other = (sdpa.attention(q, k, inputs["v"], scale=scale) for q, k in halves)
            wide = torch.promote_types(one.dtype, torch.float32)  # or lambda's gradient is rough
            y = (one.to(wide) - self.share().to(wide) * other.to(wide)).to(one.dtype)
        normed: Tensor = self.norm(y)
        return normed * (1 - self.lambda_init)

    def form_map(
        self, inputs: Roles, grid: Grid | None, rows: Tensor | None = None
    ) -> Float[Tensor, "*batch h Q M"]:
        """Form the difference of the maps; the norm comes behind its product with V."""
        halves = zip(inputs["q"].chunk(2, -1), inputs["k"].chunk(2, -1), strict=True)
        scale = math.sqrt(self.head_dim / 2)
        one, other = ((take_rows(q, rows) @ k.mT / scale).softmax(-1) for q, k in halves)
        return one - self.share().to(one.dtype) * other
