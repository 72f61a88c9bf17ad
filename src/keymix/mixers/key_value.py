# SPDX-License-Identifier: Apache-2.0
"""Key-value attention: there is no query, the keys meet themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Grid, Site, Traits
from keymix.mixers.map_mixer import MapMixer, Roles
from keymix.mixers.options import MapOptions
from keymix.mixers.registry import register_mixer


def sinusoidal_code(count: int, channels: int) -> Tensor:
    """Return one axis' part of the sinusoidal code of an index pair, ``[count, c]`` in float64.

    With m channels in all, an axis has c = 2 * ceil(m / 4): sines, then cosines, of the index
    times the frequencies 10000^(-2 k / c).

    Args:
        count: Indices 0 … count - 1.
        channels: m, the channels of the code of a pair.
    """
    half = math.ceil(channels / 4)
    k = torch.arange(half, dtype=torch.float64)
    frequency = 10000.0 ** (-2.0 * k / (2 * half))
    angle = torch.arange(count, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), -1)


@register_mixer("key_value", aliases=("kv",))
class KeyValueAttention(MapMixer):
    r"""Key-value attention: :math:`\mathrm{softmax}(K K^\top / \sqrt d)\, V`, symmetric logits.

    Paper: Key-Value Transformer, https://arxiv.org/abs/2305.19129, and its use in SETR for medical
    segmentation, Eq. 2. With ``pos_dim = m > 0``, Fig. 1b: to each scaled logit an m-channel
    sinusoidal code of its index pair (i, j) is added, then a linear map m -> 1:
    :math:`(\sum_c w_c)\, S_{ij} + \mathrm{PE}_{ij} \cdot w + b`. So the sum of w scales the
    logits, PE . w is an additive bias that is a function of i plus a function of j, and the
    N x N x m tensor is never built. w starts at 1/m, which is plain key-value attention but for
    the bias. Parameters: ``kv`` in the order k, v; ``pos_proj`` where m > 0; ``proj``.
    Differs: the original experiments divide by sqrt(C); ``scale="dim"`` follows them.

    Args:
        site: Where the mixer sits. A position code needs its grid.
        pos_dim: Channels m of the code of the index pair, 0 for none, else at least 3: the first
            two code i alone, which the softmax over j undoes.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N = M; the site's N where ``pos_dim > 0``.
    Cost: 3 N C^2 + 2 N^2 C multiply-adds.

    Raises:
        UserError: If the keys lie on another grid than the tokens (there is no query to differ
            from them), or a value is bad.
    """

    pos_code: Tensor
    roles = ("k", "v")
    joint = "kv"

    def __init__(
        self,
        site: Site,
        *,
        pos_dim: int = 0,
        **shared: Unpack[MapOptions],
    ) -> None:
        if not isinstance(pos_dim, int) or pos_dim < 0:
            raise UserError(f"{pos_dim=} must be a whole number of channels, 0 for none")
        if pos_dim and site.grid is None:
            raise UserError(f"{pos_dim=} codes positions and so needs grid=(H, W)")
        super().__init__(site, **shared)
        self.pos_dim = pos_dim
        self.pos_proj: nn.Linear | None = None
        if pos_dim:
            self.pos_proj = nn.Linear(pos_dim, 1, **self.factory)
            code = torch.empty(site.num_tokens, 2 * math.ceil(pos_dim / 4), **self.factory)
            self.register_buffer("pos_code", code, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set w to 1/m and b to 0, and fill the fixed code."""
        super().reset_parameters()
        if self.pos_proj is not None:
            nn.init.constant_(self.pos_proj.weight, 1.0 / self.pos_dim)
            nn.init.zeros_(self.pos_proj.bias)
            code = sinusoidal_code(self.site.num_tokens, self.pos_dim)
            with torch.no_grad():
                self.pos_code.copy_(code)

    @property
    def claims(self) -> Traits:
        """The traits; a position code makes places matter."""
        claims = super().claims
        if self.pos_dim:
            claims = replace(claims, permutation="positional")
        return claims

    @property
    def zero_gradients(self) -> frozenset[str]:
        """``pos_proj.bias``: it shifts all logits of a row alike, and the softmax undoes that."""
        return frozenset({"pos_proj.bias"} if self.pos_dim else ())

    def no_weight_decay(self) -> set[str]:
        """The position projection, whose neutral weight is 1/m, not 0."""
        return {"pos_proj.weight", "pos_proj.bias"} if self.pos_dim else set()

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """The keys, twice."""
        return inputs["k"], inputs["k"]

    def gain(self) -> float | Tensor:
        """The scale, times the sum of w where there is a position code."""
        gain = super().gain()
        return gain if self.pos_proj is None else gain * self.pos_proj.weight.sum()

    def own_bias(self, inputs: Roles, grid: Grid | None, rows: Tensor | None) -> Tensor | None:
        """PE . w + b as a function of i plus a function of j, ``[Q, N]``."""
        if self.pos_proj is None:
            return None
        count = inputs["k"].shape[-2]
        if count != self.site.num_tokens:
            raise UserError(
                f"the position code was built for {self.site.num_tokens} tokens and got {count}; "
                "build the model for the new image size"
            )
        c = self.pos_code.shape[-1]
        w = nn.functional.pad(self.pos_proj.weight[0], (0, 2 * c - self.pos_dim))
        code = self.pos_code.to(w.dtype)
        of_query, of_key = code @ w[:c], code @ w[c:]
        if rows is not None:
            of_query = of_query[rows]
        return of_query[:, None] + of_key + self.pos_proj.bias
