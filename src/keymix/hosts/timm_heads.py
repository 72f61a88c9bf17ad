# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of timm's attention modules, and their projections by role."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers.attention import resolve_self_attn_mask
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.maxxvit import AttentionCl
from torch import Tensor, nn
from torch.nn.utils import parametrize

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Reading, relative_positions
from keymix.hosts.base import patched
from keymix.hosts.call_grid import CALL_SIZE


def named_call(attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a call by name, defaults included."""
    bound = inspect.signature(type(attention).forward).bind(attention, *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def read_call(attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
    """Return what one of timm's attentions makes of its call, ``(x, [rope], [attn_mask], …)``.

    Queries and keys come after their norms and rotation; relative positions or a mask are a bias.
    """
    call = named_call(attention, args, kwargs)
    q, k, v = project_heads(attention, as_tokens(attention, call["x"]))
    rope = call.get("rope")
    if rope is not None:
        turn = attention.num_prefix_tokens, getattr(attention, "rotate_half", False)
        q, k = (rotate(t, rope, *turn) for t in (q, k))
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:  # several heads of queries share one of keys and values
        k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
    mask, causal = call.get("attn_mask"), call.get("is_causal", False)
    bias = resolve_self_attn_mask(q.shape[-2], q, mask, causal)
    shared = call.get("shared_rel_pos", call.get("shared_rel_pos_bias", bias))
    bias = relative_positions(attention, shared)
    return Reading(q=q, k=k, v=v, scale=attention.scale, bias=bias)


def input_format(attention: Any) -> str:
    """Say how the tokens come that an attention, or what stands there, is called with."""
    if isinstance(getattr(attention, "qkv", None), nn.Conv2d):
        return "images"
    if isinstance(attention, AttentionCl):
        return "windows"
    hosted: str = getattr(attention, "input_format", "tokens")
    return hosted


def as_tokens(attention: Any, x: Tensor) -> Tensor:
    """Return images ``[*, C, H, W]``, windows ``[*, H, W, C]`` or tokens as tokens.

    Windows of MaxViT come as an axis behind the batch, where the size of their map is known.
    """
    given, call = input_format(attention), getattr(attention, CALL_SIZE, None)
    if given == "tokens":
        return x
    x = x.flatten(2).mT if given == "images" else x.flatten(1, 2)
    if call is None or call.size is None:
        return x
    return x.reshape(-1, math.prod(call.size) // x.shape[1], *x.shape[1:])


def in_format_of(attention: Any, x: Tensor, like: Tensor) -> Tensor:
    """Return tokens in the form of what they were made of."""
    return (x.mT if input_format(attention) == "images" else x).reshape(like.shape)


def project_heads(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values ``[*, h, N, d]``, after norms where it has some."""
    parts = _projected(attention, x)
    width = _width(attention.proj) // attention.num_heads
    q, k, v = (t.reshape(*t.shape[:-1], -1, width).transpose(-3, -2) for t in parts)
    norms = (getattr(attention, f"{role}_norm", None) for role in "qk")
    q, k = (t if norm is None else norm(t) for t, norm in zip((q, k), norms, strict=True))
    return q, k, v


def rotate(t: Tensor, rope: Tensor, prefix: int, half: bool) -> Tensor:
    """Turn patch tokens of heads ``[*, h, P + N, d]`` by sines and cosines ``[N, 2 d]``; P stay.

    With ``half``, channel i turns with i + d / 2, not with its neighbour.
    """
    first, patches = t[..., :prefix, :], t[..., prefix:, :]
    return torch.cat((first, apply_rot_embed_cat(patches, rope, half=half)), -2).to(t.dtype)


def _projected(attention: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side, ``[*, N, h * d]`` each (keys and values of groups)."""
    fused: Any = getattr(attention, "qkv", None)
    if fused is None:
        return tuple(getattr(attention, f"{role}_proj")(x) for role in "qkv")
    pointwise = isinstance(fused, nn.Conv2d)
    both: Tensor = fused(x.mT[..., None])[..., 0].mT if pointwise else fused(x)
    bias = _bias_apart(attention)
    return _by_role(attention, both if bias is None else both + bias, both.ndim - 1)


def _by_role(attention: Any, joint: Tensor, axis: int) -> tuple[Tensor, ...]:
    """Part what is joined along an axis into queries, keys and values; MaxViT's come by head."""
    if getattr(attention, "head_first", False):
        sides = (*joint.shape[:axis], attention.num_heads, 3, -1, *joint.shape[axis + 1 :])
        apart = joint.reshape(sides)
        joint = apart.transpose(axis, axis + 1).flatten(axis, axis + 2)
    return joint.chunk(3, axis)


def _bias_apart(attention: Any) -> Tensor | None:
    """EVA's bias of queries and values, that of keys being nought."""
    q, v = getattr(attention, "q_bias", None), getattr(attention, "v_bias", None)
    return None if q is None or v is None else torch.cat((q, torch.zeros_like(q), v))


def _first(attention: Any) -> Any:
    """Return the projection of queries, which may be that of keys and values too."""
    return _sized(attention, "q_proj" if getattr(attention, "qkv", None) is None else "qkv")


def _width(projection: Any) -> int:
    """Return how wide the tokens are that a linear map or a 1x1 convolution takes."""
    conv = isinstance(projection, nn.Conv2d)
    return int(projection.in_channels if conv else projection.in_features)


def width_of(attention: Any) -> int:
    """Return how wide the tokens are that an attention takes."""
    return _width(_first(attention))


def keeps_width(attention: Any) -> bool:
    """Whether an attention returns tokens as wide as it takes."""
    return len(_sized(attention, "proj").weight) == width_of(attention)


def projections_of(attention: Any) -> dict[str, Any]:
    """Return the options of a timm attention: biases, dropouts, width.

    The width of a head is among them only where heads do not share the model's.
    """
    first, proj = _first(attention), _sized(attention, "proj")
    options = {
        "qkv_bias": first.bias is not None or _bias_apart(attention) is not None,
        "proj_bias": proj.bias is not None,
        "attn_drop": attention.attn_drop.p,
        "proj_drop": attention.proj_drop.p,
    }
    if _width(proj) != _width(first):
        options["head_dim"] = _width(proj) // attention.num_heads
    return options


def takes_rope(attention: nn.Module) -> bool:
    """Whether calls of an attention, or of what stands there, may bring rotary positions."""
    return "rope" in inspect.signature(type(attention).forward).parameters


def joined_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join what EVA has in pieces: ``qkv`` of its three projections, its biases of nought keys.

    Tensors have their names in the attention; groups of keys stay apart.
    """
    found = dict(tensors)
    if {"q_bias", "v_bias"} <= found.keys():
        q, v = found.pop("q_bias"), found.pop("v_bias")
        found["qkv.bias"] = torch.cat((q, torch.zeros_like(q), v))
    weights = [found[name] for name in (f"{r}_proj.weight" for r in "qkv") if name in found]
    if len(weights) != 3 or len({w.shape for w in weights}) != 1:
        return found
    found["qkv.weight"] = torch.cat([found.pop(f"{role}_proj.weight") for role in "qkv"])
    biases = [found.pop(f"{role}_proj.bias", None) for role in "qkv"]
    given = next((b for b in biases if b is not None), None)
    if given is not None:
        whole = [torch.zeros_like(given) if b is None else b for b in biases]
        found["qkv.bias"] = torch.cat(whole)
    return found


def own_weights(attention: Any) -> dict[str, Tensor]:
    """Return weights and biases of ``q``, ``k``, ``v`` and ``proj``, as ``nn.Linear`` has them.

    Keys and values that heads share in groups come once per head. EVA has no bias of keys next to
    those of queries and values; it comes as the nought that it is.
    """
    fused: Any = getattr(attention, "qkv", None)
    bias: Tensor | None
    if fused is None:
        weights, biases = _apart(attention)
    else:
        weights = list(_by_role(attention, _linear(attention, "qkv").weight.detach().flatten(1), 0))
        bias = fused.bias if fused.bias is not None else _bias_apart(attention)
        biases = [None] * 3 if bias is None else list(_by_role(attention, bias.detach(), 0))
    found = {f"{role}.weight": w for role, w in zip("qkv", weights, strict=True)}
    found |= {f"{role}.bias": b for role, b in zip("qkv", biases, strict=True) if b is not None}
    proj = _linear(attention, "proj")
    found["proj.weight"] = proj.weight.detach().flatten(1)
    if proj.bias is not None:
        found["proj.bias"] = proj.bias.detach()
    return found


def _apart(attention: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    width = attention.proj.in_features // attention.num_heads
    for role in "qkv":
        linear = _linear(attention, f"{role}_proj")
        weight = linear.weight.detach()
        bias: Tensor | None = linear.bias
        if bias is None and attention.q_proj.bias is not None:
            bias = weight.new_zeros(len(weight))
        groups = attention.proj.in_features // len(weight)
        weights.append(_spread(weight, width, groups))
        biases.append(None if bias is None else _spread(bias.detach(), width, groups))
    return weights, biases


def _spread(rows: Tensor, width: int, groups: int) -> Tensor:
    """Repeat the rows of each head for all heads of its group."""
    if groups == 1:
        return rows
    heads = rows.reshape(-1, width, *rows.shape[1:])
    return heads.repeat_interleave(groups, 0).flatten(0, 1)


def _linear(attention: nn.Module, name: str) -> Any:
    """Return a projection that is a linear map or 1x1 convolution; parametrized are weights, too.

    A subclass may add something in its forward, as adapters of low rank do.
    """
    linear = getattr(attention, name)
    kind = parametrize.type_before_parametrizations(linear)
    if kind not in (nn.Linear, nn.Conv2d) or patched(linear):
        raise _no_linear(attention, name)
    return linear


def _sized(attention: nn.Module, name: str) -> Any:
    """Return a projection that says its width, be it one that wraps a linear map."""
    linear = getattr(attention, name)
    if not hasattr(linear, "in_features") and not isinstance(linear, nn.Conv2d):
        raise _no_linear(attention, name)
    return linear


def _no_linear(attention: nn.Module, name: str) -> UserError:
    linear = getattr(attention, name)
    kind, owner = type(linear).__name__, type(attention).__name__
    if isinstance(linear, nn.Linear):
        return UserError(
            f"{name} of {owner} is {kind}, not a plain Linear, so what copying its weights would "
            "lose is not known; merge what it adds into a plain one first"
        )
    return UserError(f"{name} of {owner} is {kind}, not a linear map")
