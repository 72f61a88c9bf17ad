# SPDX-License-Identifier: Apache-2.0
"""Adapter to torchvision's ViT: attention sits at ``encoder.layers.<name>.self_attention``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import UNKNOWN, Host, Place, patched
from keymix.mixers.base import Site, TokenMixer

# the arguments of nn.MultiheadAttention, in order
NAMES = (
    *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"),
    *("average_attn_weights", "is_causal"),
)


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the tokens of a call of self-attention, with arguments as ``nn.MultiheadAttention``'s.

    Refuses queries, keys and values of other tokens, and calls for masks or causality.
    """
    given = dict(zip(NAMES, args, strict=False)) | dict(kwargs)
    x: Tensor = given["query"]
    if any(given[name] is not x for name in ("key", "value")):
        raise UserError("self_attention was called with queries, keys and values of other tokens")
    for name in ("key_padding_mask", "attn_mask"):
        if given.get(name) is not None:
            raise UserError(f"self_attention was called with {name}=, and mixers here take none")
    if given.get("is_causal"):
        raise UserError("mixers on images are not causal; call with is_causal=False")
    return x


class HostedSelfAttention(nn.Module):
    """Stands where ``nn.MultiheadAttention`` stood, takes its call, returns no weights."""

    def __init__(self, mixer: TokenMixer, place: Place) -> None:
        super().__init__()
        self.mixer = mixer
        self.place = place

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Mix the tokens ``[B, N, C]`` of a call ``(x, x, x, need_weights=False)``."""
        asked = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        x = tokens_of((query, key, value), {**asked, "is_causal": is_causal})
        if need_weights:
            raise UserError(
                "the attention here is a mixer and returns no weights: call it with "
                "need_weights=False, and see the maps through keymix.attention_maps"
            )
        return self.mixer(x), None


class TorchvisionViT(Host):
    """torchvision's VisionTransformer (vit_b_16 and the like), with its one class token."""

    name = "torchvision VisionTransformer"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is torchvision's class."""
        return isinstance(model, VisionTransformer)

    def places(self, model: nn.Module) -> list[Place]:
        """One place per block."""
        if not isinstance(model, VisionTransformer):
            raise UserError(f"{type(model).__name__} is not torchvision's VisionTransformer")
        side = model.image_size // model.patch_size
        places = []
        for name, block in model.encoder.layers.named_children():
            path = f"encoder.layers.{name}.self_attention"
            attention = getattr(block, "self_attention", None)
            if isinstance(attention, HostedSelfAttention):
                before = attention.place
                places.append(replace(before, site=replace(before.site, grid=(side, side))))
                continue
            own = _checked(path, attention)
            site = Site(
                dim=own.embed_dim, num_heads=own.num_heads, grid=(side, side), num_prefix_tokens=1
            )
            options = {
                "qkv_bias": own.in_proj_bias is not None,
                "proj_bias": own.out_proj.bias is not None,
                "attn_drop": own.dropout,
            }
            places.append(Place(path=path, stage=0, site=site, defaults=options))
        return places

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as ``nn.MultiheadAttention``'s."""
        for linear in mixer.projections[:-1]:
            nn.init.xavier_uniform_(linear.weight)
        for linear in mixer.projections:
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        before = model.get_submodule(place.path)
        hosted = HostedSelfAttention(mixer, place)
        model.set_submodule(place.path, hosted.train(before.training))

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return queries, keys and values of a call, ``[B, h, N, d]``."""
        own = _checked("self_attention", attention)
        joint = nn.functional.linear(tokens_of(args, kwargs), own.in_proj_weight, own.in_proj_bias)
        q, k, v = (
            t.reshape(*t.shape[:-1], own.num_heads, -1).transpose(-3, -2)
            for t in joint.chunk(3, -1)
        )
        return Reading(q=q, k=k, v=v, scale=own.head_dim**-0.5)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections; ``in_proj`` is split into q, k and v."""
        own = _checked("self_attention", attention)
        found = {"proj.weight": own.out_proj.weight.detach()}
        if own.out_proj.bias is not None:
            found["proj.bias"] = own.out_proj.bias.detach()
        for part, joint in (("weight", own.in_proj_weight), ("bias", own.in_proj_bias)):
            if joint is not None:
                rows = joint.detach().chunk(3)
                found |= {f"{r}.{part}": t for r, t in zip("qkv", rows, strict=True)}
        return found


def _checked(path: str, attention: Any) -> nn.MultiheadAttention:
    """Refuse what is not self-attention as torchvision's ViT builds it."""
    if type(attention) is not nn.MultiheadAttention:
        raise UserError(
            f"{path} is {type(attention).__name__}, not torch's MultiheadAttention, so what a "
            "mixer in its place would lose is not known"
        )
    if patched(attention):
        raise UserError(f"the forward of {path} (MultiheadAttention) was replaced: {UNKNOWN}")
    more = {
        "keys of other tokens (kdim, vdim)": attention.in_proj_weight is None,
        "bias_k and bias_v": attention.bias_k is not None,
        "add_zero_attn": attention.add_zero_attn,
        "batch_first=False": not attention.batch_first,
    }
    found = [name for name, there in more.items() if there]
    if found:
        raise UserError(
            f"{path} has {' and '.join(found)}, which no mixer in its place would have; build the "
            "model without"
        )
    return attention


HOSTS = (TorchvisionViT(),)
