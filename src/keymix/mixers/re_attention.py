# SPDX-License-Identifier: Apache-2.0
"""Re-attention: the heads' maps are mixed after the softmax, so that deep ViTs do not collapse."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.checkpoint import recomputing, still_statistics
from keymix.layers.folding import constant_norm, replaced
from keymix.layers.sync_batchnorm import counts_over_ranks, over_ranks, sum_over_ranks
from keymix.mixers.base import Grid, Site, Traits, heads_first, heads_last, redefines
from keymix.mixers.head_mixer import Roles
from keymix.mixers.map_mixer import LINEAR, MapMixer, MapOptions
from keymix.mixers.registry import register_mixer

Norm = Literal["batch", "layer"]
DropStage = Literal["softmax", "final"]


class ReMixing(MapMixer):
    r"""Normalised mixing of attention maps over heads, :math:`\mathrm{Norm}(\Theta^\top A + b)`.

    DeepViT Eq. 3, for maps of any source: a class puts it before the mixer that forms the logits
    and calls :meth:`_init_mixing` at the end of its own construction. A normalised map has
    negative entries and gives masked keys weight again, so such a mixer is not maskable.
    """

    theta: nn.Parameter
    theta_bias: nn.Parameter | None
    norm: nn.BatchNorm2d | nn.LayerNorm | None  # None: folded into the mixing
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
        mixed = self._mixed(maps)
        norm = self.norm
        if norm is None:
            return mixed
        if isinstance(norm, nn.LayerNorm):
            out: Tensor = norm(heads_last(mixed))
            return self._scaled(heads_first(out))
        # with heads innermost, torch on a CPU sums a map's squares up in float32, which at some
        # hundred tokens leaves no digit of the variance, and gives wrong gradients in evaluation
        flat = mixed.reshape(-1, *mixed.shape[-3:]).contiguous()
        if norm.training and not track:
            with over_ranks(norm):
                flat = nn.functional.batch_norm(
                    flat, None, None, norm.weight, norm.bias, training=True, eps=norm.eps
                )
        elif norm.training and recomputing():  # these maps moved the statistics already
            with still_statistics(norm):
                flat = norm(flat)
        else:
            flat = norm(flat)
        return self._scaled(flat.reshape(mixed.shape))

    def _mixed(self, maps: Float[Tensor, "*batch h Q M"]) -> Float[Tensor, "*batch h Q M"]:
        """Return out[g] = sum_h theta[h, g] maps[h] + b[g], by one product without copies."""
        flat = maps.flatten(-2)
        flat = flat.reshape(-1, *flat.shape[-2:])
        count = flat.shape[0]
        theta = self.theta.to(maps.dtype).T.expand(count, -1, -1)
        bias = self.theta_bias
        if bias is None:
            return (theta @ flat).view(maps.shape)
        if not maps.is_meta and torch.is_autocast_enabled(maps.device.type):
            # in few digits, a b that is large next to the map's entries would take theirs
            return (theta @ flat).view(maps.shape) + bias[:, None, None]
        start = bias.to(maps.dtype)[:, None].expand(count, -1, 1)
        return torch.baddbmm(start, theta, flat).view(maps.shape)

    def _scaled(self, maps: Tensor) -> Tensor:
        return maps if self.map_gain == 1.0 else maps * self.map_gain

    def reset_parameters(self) -> None:
        """Draw Θ and its bias again."""
        super().reset_parameters()
        if hasattr(self, "theta"):  # not yet while a base class is being built
            self._reset_mixing()

    def fold(self) -> None:
        """Fold BatchNorm, which is one affine map in evaluation, and the gain into Θ and b."""
        super().fold()
        norm, theta = self.norm, self.theta
        own = redefines(self, ReMixing, "mix_after")
        if own or not isinstance(norm, nn.BatchNorm2d) or not constant_norm(norm):
            return
        assert norm.running_mean is not None  # or it were not constant
        assert norm.running_var is not None
        rate = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
        bias = 0.0 if self.theta_bias is None else self.theta_bias.double()
        shift = norm.bias.double() + (bias - norm.running_mean.double()) * rate
        self.theta = replaced(theta, theta.double() * rate * self.map_gain)
        self.theta_bias = replaced(theta, shift * self.map_gain)
        self.norm, self.map_gain = None, 1.0

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
    def whole_maps(self) -> str | None:
        """None, unless heads are mixed elsewhere too or another norm stands here."""
        plain = self.norm is None or type(self.norm) in (nn.BatchNorm2d, nn.LayerNorm)
        return self._head_mixing() or (None if plain else "the norm is none of DeepViT's two")

    def _blocked(self, inputs: Roles, grid: Grid | None, bias: Tensor | None) -> Tensor:
        r"""Compute what the heads return, a block of query rows at a time.

        Rows of a softmax sum to one, so that a mixed map's mean is that of M weights 1/M. With it
        taken off every weight, :math:`C = A - 1/M`, BatchNorm is
        :math:`\gamma\, \Theta^\top C / \sigma + \beta` with the variance
        :math:`\Theta^\top S\, \Theta` of the h x h mean products S of C. It needs no second
        pass: :math:`\Theta^\top C V` is divided by :math:`\sigma` afterwards. Folded, it is in
        :math:`\Theta` and b.
        """
        norm = self.norm
        theta = self.theta.to(torch.promote_types(inputs["v"].dtype, torch.float32))
        if isinstance(norm, nn.LayerNorm):
            learned = (theta, self.theta_bias, norm.weight, norm.bias)
            given = [t for t in learned if t is not None]
            mix = partial(_normed, eps=norm.eps)
            y, _ = self._by_rows(inputs, grid, bias, mix=mix, learned=given)
            return self._scaled(y)
        keys = inputs["v"].shape[-2]
        if norm is None:
            assert self.theta_bias is not None  # which folding made
            # rows sum to one, so that the values may lose their mean in place of the map
            values = inputs["v"].to(theta.dtype)
            mean = values.mean(-2, keepdim=True)
            y, _ = self._by_rows(
                {**inputs, "v": values - mean},
                grid,
                bias,
                mix=lambda maps, theta: (_mixed(theta, maps), None),
                learned=(theta,),
            )
            shift = theta.sum(0) + keys * self.theta_bias
            return (y + mean * shift[:, None, None]).to(y.dtype)
        moments = norm.training or norm.running_mean is None
        factors = self.factors(inputs)
        assert factors is not None  # or the map would be formed whole
        rows = factors[0][..., 0].numel() // self.num_heads
        rows, count = counts_over_ranks(norm, (rows, rows * keys), theta)
        # of a row: keys, unless other ranks have images of other sizes
        weights = count / rows if rows else keys

        def centred_mix(maps: Tensor, theta: Tensor) -> tuple[Tensor, Tensor | None]:
            maps = maps - 1 / weights
            products = (maps @ maps.transpose(1, 2)).sum(0) if moments else None
            return _mixed(theta, maps), products

        y, products = self._by_rows(inputs, grid, bias, mix=centred_mix, learned=(theta,))
        mean = theta.sum(0) / weights
        if self.theta_bias is not None:
            mean = mean + self.theta_bias
        values = inputs["v"].sum(-2, keepdim=True)
        if products is None:
            assert norm.running_mean is not None  # or there would be moments
            assert norm.running_var is not None
            rate = norm.weight * (norm.running_var + norm.eps).rsqrt()
            shift = norm.bias + (mean - norm.running_mean) * rate
        else:
            products = sum_over_ranks(norm, products)
            variance = ((products / count @ theta) * theta).sum(0)
            rate = norm.weight * (variance + norm.eps).rsqrt()
            shift = norm.bias + 0 * mean  # which the norm takes off; its gradient is zero, not None
            self._track(mean, variance, count)
        return self._scaled(y * rate[:, None, None] + values * shift[:, None, None]).to(y.dtype)

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics as BatchNorm does."""
        norm = self.norm
        assert isinstance(norm, nn.BatchNorm2d)
        if not (self.training and norm.training) or norm.running_mean is None or recomputing():
            return
        assert norm.running_var is not None
        with torch.no_grad():
            seen = norm.num_batches_tracked
            if seen is not None:
                seen.add_(1)
            share = norm.momentum if norm.momentum is not None else 1 / float(seen or 1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            unbiased = variance * (count / max(1, count - 1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)

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


def _mixed(theta: Tensor, maps: Tensor) -> Tensor:
    """Mix the heads of entries ``[X, h, Y]``; ``theta.T @ maps`` would copy the maps first."""
    return theta.T.expand(len(maps), -1, -1) @ maps


def _normed(maps: Tensor, theta: Tensor, *rest: Tensor, eps: float) -> tuple[Tensor, None]:
    """Mix the heads of entries ``[X, h, Y]`` and norm over them."""
    *added, weight, shift = rest
    mixed = _mixed(theta, maps)
    for each in added:
        mixed = mixed + each[:, None]
    centred = mixed - mixed.mean(1, keepdim=True)
    rate = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    return centred * rate * weight[:, None] + shift[:, None], None


@register_mixer("re_attention")
class ReAttention(ReMixing):
    r"""Re-attention: :math:`\mathrm{Norm}(\Theta^\top \mathrm{softmax}(Q K^\top / \sqrt d))\, V`.

    :math:`A'_{g} = \mathrm{Norm}_{g}(\sum_h \Theta_{hg} A_h + b_{g})` over the heads' maps.
    Paper: DeepViT, https://arxiv.org/abs/2103.11886, Eq. 3. Two norms are published: BatchNorm2d
    over maps ``[B, h, N, M]`` (the authors' code) and LayerNorm over the head axis; the bias b is
    in the published parameter counts. Parameters: ``qkv``, ``theta [h, h]``, ``theta_bias [h]``,
    ``norm``, ``proj``. Not maskable, see :class:`ReMixing`.
    Differs: the authors' code drops entries of the softmax's maps, before the mixing, as
    ``attn_drop_stage="softmax"`` does; by default ``attn_drop`` acts on the final map.

    Args:
        site: Where the mixer sits.
        norm: ``"batch"`` or ``"layer"``.
        theta_bias: Bias b of the mixing.
        map_scale: Multiply the normalised map by d^-0.5, as the published code of DeepViT-S does;
            the paper does not say so.
        attn_drop_stage: Which map ``attn_drop`` drops entries of: ``"final"``, the one that
            multiplies V, or ``"softmax"``, before heads are mixed and normalised.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M. In training the BatchNorm couples the
    images of a batch, as published.
    Cost: 4 N C^2 + 2 N M C + h^2 N M multiply-adds.

    Raises:
        UserError: If a value is bad.
    """

    family = "head mixing"
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
        attn_drop_stage: DropStage = "final",
        **shared: Unpack[MapOptions],
    ) -> None:
        if attn_drop_stage not in ("softmax", "final"):
            raise UserError(f"{attn_drop_stage=} must be 'softmax' or 'final'")
        super().__init__(site, **shared)
        self._init_mixing(norm, theta_bias, map_scale)
        self.attn_drop_stage = attn_drop_stage

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixing of maps and what dropout acts on."""
        return {**super().transfer_options(), "attn_drop_stage": self.attn_drop_stage}

    def weights(
        self, inputs: Roles, grid: Grid | None, bias: Tensor | None
    ) -> Float[Tensor, "*batch h N M"]:
        """Form the map that multiplies V in a forward pass, with dropout at its stage."""
        if self.attn_drop_stage == "final":
            return super().weights(inputs, grid, bias)
        maps = self.attn_drop(self.maps(inputs, grid, bias, stage="softmax"))
        return self.mix_after(maps, track=self.training)

    def fold(self) -> None:
        """Bring the factor of the logits into the queries, besides what the mixing folds."""
        super().fold()
        if not redefines(self, ReAttention, *LINEAR):
            self.scale_queries()

    def factors(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Queries and keys, both computed."""
        return inputs["q"], inputs["k"]
