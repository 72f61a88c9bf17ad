# SPDX-License-Identifier: Apache-2.0
"""Adapters to ``nn.MultiheadAttention``: in torchvision's ViT, and as self-attention anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import UNKNOWN, Place, patched
from keymix.hosts.blocks import BlockHost, Facts
from keymix.hosts.call_grid import CallGrid
from keymix.hosts.hosted import HostedMixer, additive_mask
from keymix.hosts.timm_heads import named_call
from keymix.mixers.base import Grid, TokenMixer


def tokens_of(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return tokens ``[B, N, C]`` and masks, as one bias, of a call of self-attention.

    Refuses queries, keys and values of other tokens, and causality that is but hinted at.
    """
    x = query
    if key is not x or value is not x:
        raise UserError(
            "self_attention was called with queries, keys and values of other tokens; leave out "
            "what is no self-attention (layers=)"
        )
    if x.ndim != 3:
        raise UserError(f"mixers take batches of tokens, not {x.ndim} axes")
    x = x if attention.batch_first else x.transpose(0, 1)
    mask, padding = attn_mask, key_padding_mask
    if is_causal and mask is None:
        raise UserError("mixers on images are not causal; call with is_causal=False")
    if mask is not None and mask.ndim == 3:
        mask = mask.reshape(-1, attention.num_heads, *mask.shape[1:])
    both = [_bias(m, x) for m in (mask, None if padding is None else padding[:, None, None])]
    there = [bias for bias in both if bias is not None]
    return x, sum(there[1:], there[0]) if there else None


def _bias(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Turn a boolean mask (True: may not attend, as PyTorch has it here) into a bias."""
    boolean = mask is not None and mask.dtype == torch.bool
    return additive_mask(~mask, x) if mask is not None and boolean else mask


class HostedSelfAttention(HostedMixer):
    """Stands where ``nn.MultiheadAttention`` stood, and takes its call.

    It has no ``in_proj_bias``, from which ``nn.TransformerEncoderLayer`` concludes that it must not
    compute attention by itself, past this module, as it does in evaluation.
    """

    in_proj_bias = None

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__(mixer, place, call, before)
        self.batch_first, self.num_heads = before.batch_first, place.site.num_heads

    def forward(  # type: ignore[override]  # PyTorch's call
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens; return the map, too, where it is asked for and the mixer has one."""
        x, bias = tokens_of(self, query, key, value, key_padding_mask, attn_mask, is_causal)
        if bias is not None and not self.mixer.claims.maskable:
            raise UserError(f"mixer {self.mixer.mixer_name!r} cannot honour an attention mask")
        grid = self.grid_of(x)
        out = self.mixer(x, grid=grid, bias=bias)
        out = out if self.batch_first else out.transpose(0, 1)
        if not need_weights or not self.mixer.forms_map():
            return out, None
        weights = self.mixer.attention_map(x, grid=grid, bias=bias)
        return out, weights.mean(1) if average_attn_weights else weights


class TorchAttention(BlockHost):
    """Any model that holds ``nn.MultiheadAttention``, alone or in ``nn.TransformerEncoderLayer``.

    Attention to other tokens is left alone where the module shows it: in decoder layers, and where
    keys have a width of their own. Elsewhere it shows at the first call, which is refused.
    """

    name = "models that hold nn.MultiheadAttention"
    generic = True
    hosted = HostedSelfAttention

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of attention in the order in which the model holds it."""
        crossed = {
            id(module.multihead_attn)
            for module in model.modules()
            if isinstance(module, nn.TransformerDecoderLayer)
        }
        return [
            path
            for path, module in model.named_modules()
            if path
            and isinstance(module, nn.MultiheadAttention | HostedSelfAttention)
            and id(module) not in crossed
            and getattr(module, "_qkv_same_embed_dim", True)
        ]

    def facts(self, model: nn.Module, path: str) -> Facts:
        """Describe PyTorch's attention."""
        own = _checked(path, model.get_submodule(path))
        options = {
            "qkv_bias": own.in_proj_bias is not None,
            "proj_bias": own.out_proj.bias is not None,
            "attn_drop": own.dropout,
        }
        return Facts(dim=own.embed_dim, num_heads=own.num_heads, options=options)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw weights as ``nn.MultiheadAttention`` does; biases are nought."""
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there; its input projections start as PyTorch draws its own."""
        for linear in mixer.projections[:-1]:
            nn.init.xavier_uniform_(linear.weight)
        super().put(model, place, mixer)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # which mixers do not take

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return queries, keys and values of a call, ``[B, h, N, d]``."""
        own = _checked("self_attention", attention)
        call = named_call(own, args, kwargs)
        names = "query", "key", "value", "key_padding_mask", "attn_mask", "is_causal"
        x, bias = tokens_of(own, *(call[name] for name in names))
        joint = nn.functional.linear(x, own.in_proj_weight, own.in_proj_bias)
        q, k, v = (
            t.reshape(*t.shape[:-1], own.num_heads, -1).transpose(-3, -2)
            for t in joint.chunk(3, -1)
        )
        return Reading(q=q, k=k, v=v, scale=own.head_dim**-0.5, bias=bias)

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


class TorchvisionViT(TorchAttention):
    """torchvision's VisionTransformer (vit_b_16 and the like), with its one class token."""

    name = "torchvision VisionTransformer"
    generic = False

    def serves(self, model: nn.Module) -> bool:
        """Whether it is torchvision's class."""
        return isinstance(model, VisionTransformer)

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of every block's attention, whatever sits there now."""
        if not isinstance(model, VisionTransformer):
            raise UserError(f"{type(model).__name__} is not torchvision's VisionTransformer")
        names = (name for name, _ in model.encoder.layers.named_children())
        return [f"encoder.layers.{name}.self_attention" for name in names]

    def grid(self, model: Any, attention: nn.Module, path: str) -> Grid:
        """Return the one grid that the model takes."""
        side = model.image_size // model.patch_size
        return side, side

    def prefix(self, model: nn.Module, path: str) -> int:
        """Count the class token."""
        return 1


def _checked(path: str, attention: Any) -> nn.MultiheadAttention:
    """Refuse what is not self-attention as a mixer can stand for it."""
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
    }
    found = [name for name, there in more.items() if there]
    if found:
        raise UserError(
            f"{path} has {' and '.join(found)}, which no mixer in its place would have; build the "
            "model without"
        )
    return attention


HOSTS = (TorchvisionViT(), TorchAttention())
