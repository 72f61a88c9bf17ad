# SPDX-License-Identifier: Apache-2.0
"""Re-attention: the heads' maps are mixed after the softmax, so that deep ViTs do not collapse."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.checkpoint import recomputing, still_statistics
from keymix.mixers.base import Site, Traits, heads_first, heads_last
from keymix.mixers.map_mixer import MapMixer, MapOptions, Roles
from keymix.mixers.registry import register_mixer

Norm = Literal["batch", "layer"]


class ReMixing(MapMixer):
    r"""Normalised mixing of attention maps over heads, :math:`\mathrm{Norm}(\Theta^\top A + b)`.

    DeepViT Eq. 3, for maps of any source: a class puts it before the mixer that forms the logits
    and calls :meth:`_init_mixing` at the end of its own construction. A normalised map has
    negative entries and gives masked keys weight again, so such a mixer is not maskable.
    """

    theta: nn.Parameter
    theta_bias: nn.Parameter | None
    norm: nn.BatchNorm2d | nn.LayerNorm
    map_norm = "norm"
    collapse_remedy = "Re-attention"

    def _init_mixing(self, norm: Norm, theta_bias: bool, map_scale: bool = False) -> None:
        heads, factory = self.num_heads, self.factory
        if map_scale:
            self.map_gain = self.head_dim**-0.5
        if norm not in ("batch", "layer"):
            raise UserError(f"{norm=} must be 'batch' (the published code) or 'layer'")
        self.theta = nn.Parameter(torch.empty(heads, heads, **factory))
        if theta_bias:
            self.theta_bias = nn.Parameter(torch.empty(heads, **factory))
        else:
            self.register_parameter("theta_bias", None)
        if norm == "batch":
            self.norm = nn.BatchNorm2d(heads, **factory)
        else:
            self.norm = nn.LayerNorm(heads, **factory)
        self._reset_mixing()

    def _reset_mixing(self) -> None:
        """Draw Θ and its bias as the published code's 1x1 convolution: U(-h^-0.5, h^-0.5)."""
        bound = self.theta.shape[0] ** -0.5
        nn.init.uniform_(self.theta, -bound, bound)
        if self.theta_bias is not None:
            nn.init.uniform_(self.theta_bias, -bound, bound)

    def mix_after(self, maps: Float[Tensor, "*batch h Q M"], track: bool) -> Tensor:
        """Mix over heads by Θ and normalise; ``track`` lets the running statistics move."""
        maps = super().mix_after(maps, track)
        # out[g] = sum_h theta[h, g] maps[h] + b[g], heads moved last and back
        mixed = heads_last(maps) @ self.theta.to(maps.dtype)
        if self.theta_bias is not None:
            mixed = mixed + self.theta_bias
        if isinstance(self.norm, nn.LayerNorm):
            out: Tensor = self.norm(mixed)
            return self._scaled(heads_first(out))
        mixed = heads_first(mixed)
        # with heads innermost, torch on a CPU sums a map's squares up in float32, which at some
        # hundred tokens leaves no digit of the variance, and gives wrong gradients in evaluation
        flat = mixed.reshape(-1, *mixed.shape[-3:]).contiguous()
        norm = self.norm
        if norm.training and not track:
            flat = nn.functional.batch_norm(
                flat, None, None, norm.weight, norm.bias, training=True, eps=norm.eps
            )
        elif norm.training and recomputing():  # these maps moved the statistics already
            with still_statistics(norm):
                flat = norm(flat)
        else:
            flat = norm(flat)
        return self._scaled(flat.reshape(mixed.shape))

    def _scaled(self, maps: Tensor) -> Tensor:
        return maps if self.map_gain == 1.0 else maps * self.map_gain

    def reset_parameters(self) -> None:
        """Draw Θ and its bias again."""
        super().reset_parameters()
        if hasattr(self, "theta"):  # not yet while a base class is being built
            self._reset_mixing()

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any map mixer and how maps are mixed."""
        return {
            **super().transfer_options(),
            "norm": "layer" if isinstance(self.norm, nn.LayerNorm) else "batch",
            "theta_bias": self.theta_bias is not None,
            "map_scale": self.map_gain != 1.0,
        }

    def neutralize(self, copied: Collection[str]) -> set[str]:
        """Let the heads' mixing start at the identity, unless it was copied."""
        if "theta" in copied:
            return set()
        nn.init.eye_(self.theta)
        if self.theta_bias is None:
            return {"theta"}
        nn.init.zeros_(self.theta_bias)
        return {"theta", "theta_bias"}

    @property
    def claims(self) -> Traits:
        """The traits; a normalised map gives masked keys weight again."""
        return replace(super().claims, maskable=False)

    @property
    def plain_softmax(self) -> str:
        """Why fused attention cannot serve."""
        return "re-attention mixes the maps after the softmax"

    @property
    def mixes_rows(self) -> bool:
        """In training BatchNorm's statistics run over all rows."""
        return self.centred

    @property
    def centred(self) -> bool:
        """Whether each mixed map loses its mean: BatchNorm, unless it stands in eval mode."""
        return isinstance(self.norm, nn.BatchNorm2d) and self.norm.training

    @property
    def zero_gradients(self) -> frozenset[str]:
        """Biases on whole maps under BatchNorm in training, which subtracts them with the mean."""
        mine = set()
        if self.centred and self.theta_bias is not None:
            mine.add("theta_bias")
        if self.centred and self.talking_post is not None and self.talking_post.bias is not None:
            mine.add("talking_post.bias")
        return super().zero_gradients | mine


@register_mixer("re_attention")
class ReAttention(ReMixing):
    r"""Re-attention: :math:`\mathrm{Norm}(\Theta^\top \mathrm{softmax}(Q K^\top / \sqrt d))\, V`.

    :math:`A'_{g} = \mathrm{Norm}_{g}(\sum_h \Theta_{hg} A_h + b_{g})` over the heads' maps.
    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Eq. 3. Two norms are published: BatchNorm2d
    over maps ``[B, h, N, M]`` (the authors' code) and LayerNorm over the head axis; the bias b is
    in the published parameter counts. Parameters: ``qkv``, ``theta [h, h]``, ``theta_bias [h]``,
    ``norm``, ``proj``. Not maskable, see :class:`ReMixing`.
    Differs: the authors' code drops entries of the softmax's maps, before the mixing; ``attn_drop``
    acts on the final map.

    Args:
        site: Where the mixer sits.
        norm: ``"batch"`` or ``"layer"``.
        theta_bias: Bias b of the mixing.
        map_scale: Multiply the normalised map by d^-0.5, as the published code of DeepViT-S does;
            the paper does not say so.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M. In training the BatchNorm couples the
    images of a batch, as published.
    Cost: 4 N C^2 + 2 N M C + h^2 N M multiply-adds.

    Raises:
        UserError: If a value is bad.
    """

    about = (
        "Softmax attention whose maps are mixed across heads by a learned matrix and "
        "normalised, so that the maps of deep layers stay different. DeepViT, arXiv "
        "2103.11886, Eq. 3."
    )

    traits = Traits(maskable=False)

    def __init__(
        self,
        site: Site,
        *,
        norm: Norm = "batch",
        theta_bias: bool = True,
        map_scale: bool = False,
        **shared: Unpack[MapOptions],
    ) -> None:
        super().__init__(site, **shared)
        self._init_mixing(norm, theta_bias, map_scale)

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Queries and keys, both computed."""
        return inputs["q"], inputs["k"]
