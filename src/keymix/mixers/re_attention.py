# SPDX-License-Identifier: Apache-2.0
"""Re-attention: the heads' maps are mixed after the softmax, so that deep ViTs do not collapse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Site, Traits
from keymix.mixers.map_mixer import Backend, MapMixer, Roles, Scale
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

    def _init_mixing(
        self, heads: int, norm: Norm, theta_bias: bool, factory: dict[str, Any]
    ) -> None:
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
        mixed = maps.movedim(-3, -1) @ self.theta.to(maps.dtype)
        if self.theta_bias is not None:
            mixed = mixed + self.theta_bias
        if isinstance(self.norm, nn.LayerNorm):
            out: Tensor = self.norm(mixed)
            return out.movedim(-1, -3)
        mixed = mixed.movedim(-1, -3)
        flat = mixed.reshape(-1, *mixed.shape[-3:])
        norm = self.norm
        if norm.training and not track:
            flat = nn.functional.batch_norm(
                flat, None, None, norm.weight, norm.bias, training=True, eps=norm.eps
            )
        else:
            flat = norm(flat)
        return flat.reshape(mixed.shape)

    def reset_parameters(self) -> None:
        """Draw Θ and its bias anew."""
        super().reset_parameters()
        if hasattr(self, "theta"):  # not yet while a base class is being built
            self._reset_mixing()

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
        """``theta_bias`` under BatchNorm in training, which subtracts it again with the mean."""
        mine = {"theta_bias"} if self.centred and self.theta_bias is not None else set()
        return super().zero_gradients | mine


@register_mixer("re_attention")
class ReAttention(ReMixing):
    r"""Re-attention: :math:`\mathrm{Norm}(\Theta^\top \mathrm{softmax}(Q K^\top / \sqrt d))\, V`.

    :math:`A'_{g} = \mathrm{Norm}_{g}(\sum_h \Theta_{hg} A_h + b_{g})` over the heads' maps.
    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Eq. 3. Two norms are published: BatchNorm2d
    over maps ``[B, h, N, M]`` (the authors' code) and LayerNorm over the head axis; the bias b is
    in the published parameter counts. Parameters: ``qkv``, ``theta [h, h]``, ``theta_bias [h]``,
    ``norm``, ``proj``. Not maskable, see :class:`ReMixing`.

    Args:
        site: Where the mixer sits.
        norm: ``"batch"`` or ``"layer"``.
        theta_bias: Bias b of the mixing.
        head_dim: As in :class:`keymix.mixers.map_mixer.MapMixer`, like all that follow.
        qkv_bias: Biases of q, k and v.
        proj_bias: Bias of the output projection.
        scale: Factor of the logits.
        temperature: Learn the factor.
        mask_diagonal: Forbid a query its own position (before the mixing).
        talking_heads: Mix heads before and after the softmax, then re-attend.
        attn_drop: Dropout probability on the map, after the norm.
        proj_drop: Dropout probability on the output.
        backend: Computation path.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M. In training the BatchNorm couples the
    images of a batch, as published.
    Cost: 4 N C^2 + 2 N M C + h^2 N M multiply-adds.

    Raises:
        UserError: If a value is bad.
    """

    traits = Traits(maskable=False)

    def __init__(
        self,
        site: Site,
        *,
        norm: Norm = "batch",
        theta_bias: bool = True,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        scale: Scale = "head_dim",
        temperature: bool = False,
        mask_diagonal: bool = False,
        talking_heads: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        backend: Backend = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            site,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            scale=scale,
            temperature=temperature,
            mask_diagonal=mask_diagonal,
            talking_heads=talking_heads,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self._init_mixing(self.num_heads, norm, theta_bias, {"device": device, "dtype": dtype})

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Queries and keys, both computed."""
        return inputs["q"], inputs["k"]
