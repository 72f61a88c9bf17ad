# SPDX-License-Identifier: Apache-2.0
"""Static keys under re-attention: a key source and a head mixing from two papers, composed."""

from __future__ import annotations

from typing import Unpack

from keymix.mixers.base import Site, Traits
from keymix.mixers.re_attention import Norm, ReMixing
from keymix.mixers.registry import register_mixer
from keymix.mixers.static_key import KeyOptions, StaticKeyAttention


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
        query_proj: As in ``static_key``.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]`` with the site's N.
    Cost: 3 N C^2 + 2 N M C + h^2 N M multiply-adds.
    """

    family = "head mixing"
    about = "The maps of static keys, mixed across heads as by re-attention. No paper measured it."

    traits = Traits(maskable=False, permutation="positional", named_only=True)

    def __init__(
        self,
        site: Site,
        *,
        norm: Norm = "batch",
        theta_bias: bool = True,
        **shared: Unpack[KeyOptions],
    ) -> None:
        super().__init__(site, **shared)
        self._init_mixing(norm, theta_bias)

    @property
    def whole_maps(self) -> str | None:
        """As of re-attention, over rows that sum to one."""
        if self.activation != "softmax":
            return f"rows of activation={self.activation!r} do not sum to one"
        return super().whole_maps

    @property
    def zero_gradients(self) -> frozenset[str]:
        """Also StarReLU's bias, which shifts every map alike, where BatchNorm takes the mean."""
        shifts = {"act.bias"} if self.centred and self.act is not None else set()
        return super().zero_gradients | shifts
