# SPDX-License-Identifier: Apache-2.0
"""Static keys under re-attention: a key source and a head mixing from two papers, composed."""

from __future__ import annotations

from typing import Any

from keymix.mixers.base import Site, Traits
from keymix.mixers.map_mixer import Backend, Scale
from keymix.mixers.re_attention import Norm, ReMixing
from keymix.mixers.registry import register_mixer
from keymix.mixers.static_key import Activation, StaticKeyAttention


@register_mixer("static_key_re_attention", aliases=("ska_re_attention",))
class StaticKeyReAttention(ReMixing, StaticKeyAttention):
    r"""Re-attention over static-key maps: :math:`\mathrm{Norm}(\Theta^\top A)\, V`.

    :math:`A_h = \mathrm{softmax}(s\, Q_h W_{K,h}^\top)` as SKA Sec. 4.1, then DeepViT Eq. 3. No
    paper measured it; it shows what the seam composes. Parameters: those of ``static_key`` and
    ``theta [h, h]``, ``theta_bias [h]``, ``norm``. Not maskable, see :class:`ReMixing`.

    Args:
        site: Where the mixer sits; its grid fixes the number of keys.
        norm: ``"batch"`` or ``"layer"``, as in ``re_attention``.
        theta_bias: Bias of the mixing.
        activation: As in ``static_key``.
        key_init_std: As in ``static_key``.
        head_dim: As in :class:`keymix.mixers.map_mixer.MapMixer`, like all that follow.
        qkv_bias: Biases of q and v.
        proj_bias: Bias of the output projection.
        scale: Factor of the logits.
        temperature: Learn the factor.
        mask_diagonal: Forbid a query the key of its own position (before the mixing).
        talking_heads: Mix heads before and after the activation, then re-attend.
        attn_drop: Dropout probability on the map, after the norm.
        proj_drop: Dropout probability on the output.
        backend: Computation path.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]`` with the site's N.
    Cost: 3 N C^2 + 2 N M C + h^2 N M multiply-adds.
    """

    traits = Traits(maskable=False, permutation="positional", composed=True)

    def __init__(
        self,
        site: Site,
        *,
        norm: Norm = "batch",
        theta_bias: bool = True,
        activation: Activation = "softmax",
        key_init_std: float = 1.0,
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
            activation=activation,
            key_init_std=key_init_std,
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

    @property
    def zero_gradients(self) -> frozenset[str]:
        """Also StarReLU's bias, which shifts every map alike, where BatchNorm takes the mean."""
        shifts = {"act.bias"} if self.centred and self.act is not None else set()
        return super().zero_gradients | shifts
