# SPDX-License-Identifier: Apache-2.0
"""Static key attention: the key is learned, not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.errors import UserError, unknown
from keymix.mixers.base import Grid, Site, Traits
from keymix.mixers.map_mixer import MapMixer, Roles
from keymix.mixers.options import MapOptions
from keymix.mixers.registry import register_mixer

Activation = Literal["softmax", "gelu", "relu", "star_relu"]
ACTIVATIONS = ("softmax", "gelu", "relu", "star_relu")


class StarReLU(nn.Module):
    """``scale * relu(x)^2 + bias`` with both numbers learned (MetaFormer baselines, Eq. 4)."""

    def __init__(self, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Start at the square of ReLU."""
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.scale * F.relu(x).square() + self.bias


class KeyOptions(MapOptions, total=False):
    """The options of :class:`LearnedKeys`, its own and those it hands on."""

    activation: Activation
    key_init_std: float


class LearnedKeys(MapMixer):
    """What static and convolutional static keys share: activations, key grid, key parameter.

    Args:
        activation: What turns logits into weights (SKA Table 4).
        key_init_std: Standard deviation of the keys' normal initialisation.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.
    """

    roles = ("q", "v")
    joint = None

    def __init__(
        self,
        site: Site,
        *,
        activation: Activation = "softmax",
        key_init_std: float = 1.0,
        **shared: Unpack[MapOptions],
    ) -> None:
        if site.grid is None:
            raise UserError(
                f"mixer {self.mixer_name!r} learns one key a position and so needs grid=(H, W)"
            )
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        if shared.get("mask_diagonal") and activation != "softmax":
            raise UserError(f"mask_diagonal=True needs the softmax, not {activation=}")
        if not key_init_std > 0:
            raise UserError(f"{key_init_std=} must be above 0")
        super().__init__(site, **shared)
        self.activation, self.key_init_std = activation, key_init_std
        self.act = StarReLU(**self.factory) if activation == "star_relu" else None

    @property
    def claims(self) -> Traits:
        """The traits; only the softmax and ReLU give a masked key no weight."""
        claims = super().claims
        maskable = claims.maskable and self.activation in ("softmax", "relu")
        return replace(claims, maskable=maskable)

    @property
    def plain_softmax(self) -> str | None:
        """None if the map is a plain softmax of logits, else what makes it another thing."""
        if self.activation != "softmax":
            return f"activation={self.activation!r} is not the softmax"
        return super().plain_softmax

    def activate(self, logits: Tensor) -> Tensor:
        """Turn logits into weights by the chosen activation."""
        if self.act is not None:
            out: Tensor = self.act(logits)
            return out
        if self.activation == "gelu":
            return F.gelu(logits)
        if self.activation == "relu":
            return F.relu(logits)
        return logits.softmax(-1)

    def key_shape(self) -> tuple[int, ...]:
        """Shape of the static key: ``[h, M, d]``, or ``[nW, h, M, d]`` with keys a window."""
        windows = (self.site.windows,) if self.site.windows > 1 else ()
        return (*windows, self.num_heads, self.site.num_keys, self.head_dim)

    def resolve_grid(self, x: Tensor, grid: Grid | None) -> Grid | None:
        """Return the site's grid and refuse any other: the keys were laid for the site's.

        Raises:
            UserError: If width, number of tokens or grid disagree with the site.
        """
        count = x.shape[-2]
        if count != self.site.num_tokens or (grid is not None and tuple(grid) != self.site.grid):
            on = f" on a grid of {tuple(grid)}" if grid is not None else ""
            raise UserError(
                f"{self.mixer_name!r} learned its keys on a grid of {self.site.grid} with "
                f"{self.site.num_prefix_tokens} prefix tokens ({self.site.num_tokens} tokens), "
                f"and got {count} tokens{on}; build the model for the new image size"
            )
        return super().resolve_grid(x, grid)


@register_mixer("static_key", aliases=("ska",))
class StaticKeyAttention(LearnedKeys):
    r"""Static key attention: :math:`\mathrm{softmax}(s\, Q_h W_{K,h}^\top)\, V_h`, key learned.

    Paper: Static Key Attention in Vision, https://arxiv.org/abs/2412.07049, Sec. 4.1 and
    Algorithm 1. Letters: their :math:`W_{K,h}`, N x d_h, is our ``key[h]``. Parameters: ``q``,
    ``key [h, M, d]`` (one row a key, prefix rows first; ``[nW, h, M, d]`` under windows), ``v``,
    ``proj``.
    Differs: Algorithm 1 leaves the logits unscaled, Sec. 6.1 scales them; we scale by default and
    ``scale=False`` follows Algorithm 1.

    Args:
        site: Where the mixer sits; its grid fixes the number of keys.
        activation: ``"softmax"``, or ``"gelu"``, ``"relu"``, ``"star_relu"`` (SKA Table 4).
        key_init_std: Standard deviation of the keys at the start; 1 as in Algorithm 1.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]`` with the site's N.
    Cost: 3 N C^2 + 2 N M C multiply-adds, 3 C^2 + M C weights (SKA Table 6).

    Raises:
        UserError: If the site has no grid, or a value is bad.
    """

    traits = Traits(permutation="positional")

    def __init__(self, site: Site, **shared: Unpack[KeyOptions]) -> None:
        super().__init__(site, **shared)
        self.key = nn.Parameter(torch.empty(self.key_shape(), **self.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the keys from N(0, key_init_std^2)."""
        super().reset_parameters()
        nn.init.normal_(self.key, std=self.key_init_std)

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Queries computed, keys learned."""
        return inputs["q"], self.key.to(inputs["q"].dtype)
