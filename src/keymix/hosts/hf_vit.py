# SPDX-License-Identifier: Apache-2.0
"""Adapter to Hugging Face's vision transformers: attention sits in each layer.

transformers is never imported here: whoever hands in one of its models has done so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import UNKNOWN, Place, patched, refuse_adapter
from keymix.hosts.blocks import POSITIONS, BlockHost, Facts
from keymix.hosts.call_grid import CallGrid, ConvGrid, given_size, patches_of
from keymix.hosts.head_norms import HeadFinish, HeadNorms, Turn, turn_of
from keymix.hosts.hosted import HostedMixer, additive_mask
from keymix.hosts.projections import ROWS, facts_of, read_row, row_of, weights_of
from keymix.hosts.timm_heads import rotate
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.map_mixer import MapMixer

FAMILIES = (
    *("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "beit", "dinov3_vit"),
    *("clip", "siglip", "yolos", "dpt", "ijepa", "vit_msn"),
)
SWIN = ("swin", "swinv2")
SINCE = "5.20"  # from which on the attention of these has one of the known layouts
PREFIX = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
ROPE = ("rotary positions",)


class HostedAttention(HostedMixer):
    """Stands where a layer's attention stood, takes its call, returns no weights.

    ``config`` is the model's, which may ask for attention weights. ``alone`` says that the output
    is returned by itself, not with weights.
    """

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__(mixer, place, call, before)
        self.config = _inner(before).config
        self.alone = getattr(before, "alone", _inner(before) is not before)
        self.turn = turn_of(mixer)

    def forward(  # type: ignore[override]  # a layer of transformers calls it
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Mix the tokens ``[B, N, C]``; refuse to return weights, and masks it cannot honour."""
        refuse_weights(self.config, kwargs)
        bias = _bias(attention_mask, hidden_states)
        if POSITIONS in self.place.extras and not isinstance(self.mixer, MapMixer):
            bias = None  # no map, no logits to add them to
        elif bias is not None and not (
            self.mixer.claims.maskable or POSITIONS in self.place.extras
        ):
            raise UserError(f"mixer {self.mixer.mixer_name!r} cannot honour an attention mask")
        with self.turn.to(_rope(position_embeddings)):
            out = self.mixer(hidden_states, grid=self.grid_of(hidden_states), bias=bias)
        return out if self.alone else (out, None)


class HuggingFaceViT(BlockHost):
    """Vision transformers of Hugging Face's transformers: ViT, DINOv2, DINOv3, CLIP and the like.

    The mixer replaces queries, keys, values and the output projection; the layer's dropout and
    scale stay, and so do rotary positions (DINOv3) and the relative ones (BEiT). Images of another
    size are taken as the model takes them (DINOv2 any, others with
    ``interpolate_pos_encoding=True``). The model may be part of another; of CLIP's and SigLIP's two
    towers it is the one that gets images.

    Sites have the grid of ``config.image_size`` (DINOv2's is the one it was trained on last,
    518x518), unless the model was given an attribute ``image_size``, a side or (height, width) in
    pixels, before mixers are put. YOLOS has tokens behind its patches and MAE shuffles them, so
    that no grid is known there.
    """

    name = f"Hugging Face vision transformers ({', '.join(FAMILIES)})"
    generic = True
    hosted = HostedAttention
    hook = ConvGrid
    remedy = ""

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of every layer's attention."""
        return [path for path in attentions(model) if owner_of(model, path) is not None]

    def facts(self, model: nn.Module, path: str) -> Facts:
        """Describe the library's attention."""
        own = model.get_submodule(path)
        takes = inspect.signature(type(own).forward).parameters
        norms = None
        if "position_embeddings" in takes:
            prefix = self.prefix(model, path)
            turning = HeadFinish(None, Turn(), prefix=prefix, halves=True)
            norms = HeadNorms({"q": turning, "k": turning}, ROPE)
        around = (model.get_submodule(path.rpartition(".")[0]), owner_of(model, path))
        biased = any(
            getattr(module, name, None) is not None
            for module in around
            for name in ("relative_position_bias", "shared_position_bias")
        )
        extras = (POSITIONS,) if biased else ()
        return replace(described(path, own), norms=norms, extras=extras)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws its own."""
        around: Any = owner_of(model, path)
        around._init_weights(linear)

    def embed(self, model: nn.Module, path: str) -> nn.Module | None:
        """Return the convolution that cuts patches."""
        return patches_in(owner_of(model, path))

    def grid(self, model: nn.Module, attention: nn.Module, path: str) -> Grid | None:
        """Return the grid of patches; None where tokens do not lie on it in order."""
        owner = owner_of(model, path)
        if any(hasattr(owner.embeddings, name) for name in ("detection_tokens", "random_masking")):
            return None
        size = given_size(model) or whole_size("image_size", owner.config.image_size)
        conv = patches_in(owner)
        assert conv is not None
        return patches_of(conv, size)

    def prefix(self, model: nn.Module, path: str) -> int:
        """Count class, distillation and register tokens."""
        tokens = (getattr(owner_of(model, path).embeddings, name, None) for name in PREFIX)
        return sum(1 if t.ndim == 1 else t.shape[1] for t in tokens if t is not None)

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return queries, keys and values of a call, ``[B, h, N, d]``."""
        given = dict(zip(("hidden_states", "attention_mask"), args, strict=False)) | dict(kwargs)
        x: Tensor = given["hidden_states"]
        read = projected("attention", attention, x)
        rope, q, k = _rope(given.get("position_embeddings")), read.q, read.k
        if rope is not None:
            q, k = (rotate(t, rope, t.shape[-2] - rope.shape[-2], True) for t in (q, k))
        return replace(read, q=q, k=k, bias=_bias(given.get("attention_mask"), x))

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections."""
        return weights_of(attention, row_in("attention", attention))


def refuse_weights(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a call that asks for attention weights, itself or through a model's configuration."""
    if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
        raise UserError(
            "the attention here is a mixer and returns no weights: call the model with "
            "output_attentions=False, and see the maps through keymix.attention_maps"
        )


def of_family(kind: type, families: Sequence[str] = (*FAMILIES, *SWIN)) -> bool:
    """Whether a class, or one it inherits from, is of some of transformers' models."""
    packages = {f"transformers.models.{name}" for name in families}
    return any(cls.__module__.rpartition(".")[0] in packages for cls in kind.__mro__)


def patches_in(owner: Any) -> nn.Conv2d | None:
    """Return the convolution in a model's embeddings that cuts patches."""
    embeddings = getattr(owner, "embeddings", None)
    for name in ("patch_embeddings", "patch_embedding"):
        found = getattr(embeddings, name, None)
        found = getattr(found, "projection", found)
        if isinstance(found, nn.Conv2d):
            return found
    return None


def owner_of(model: nn.Module, path: str) -> Any:
    """Return the nearest model around a path that cuts images into patches, None if none does."""
    while path:
        path = path.rpartition(".")[0]
        around = model.get_submodule(path)
        if patches_in(around) is not None:
            return around
    return None


def attentions(model: nn.Module, families: Sequence[str] = FAMILIES) -> Iterator[str]:
    """Yield the path of every layer's attention, whatever sits there now."""
    for path, layer in model.named_modules():
        if of_family(type(layer), families) and type(layer).__name__.endswith("Layer"):
            for name in ("attention", "self_attn"):
                if hasattr(layer, name):
                    yield f"{path}.{name}".lstrip(".")


def _inner(attention: Any) -> Any:
    """Return what has heads: the attention, or the one inside that YOLOS, DPT and Swin V2 have."""
    return getattr(attention, "attention", None) or getattr(attention, "self", attention)


def _first(module: Any, *names: str) -> Any:
    """Return the first of some attributes that a module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def described(path: str, own: Any) -> Facts:
    """Describe an attention of transformers with its heads, biases and dropouts."""
    row, inner = row_in(path, own), _inner(own)
    dropout = _first(inner, "attention_dropout", "dropout", "dropout_prob")
    options = {"attn_drop": getattr(dropout, "p", dropout)}
    if inner is not own:
        options["proj_drop"] = own.output.dropout.p
    return facts_of(own, row, _first(inner, "num_attention_heads", "num_heads"), options)


def projected(path: str, own: Any, x: Tensor) -> Reading:
    """Return queries, keys and values of tokens, before anything that is done to them."""
    row, inner = row_in(path, own), _inner(own)
    width = _first(inner, "head_dim", "attention_head_size")
    scale = getattr(inner, "scaling", getattr(inner, "scale", width**-0.5))
    return read_row(own, row, x, width, scale)


def _rope(both: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """Join cosines and sines as timm does."""
    return None if both is None else torch.cat((both[1], both[0]), -1)


def row_in(path: str, attention: Any) -> tuple[str, ...]:
    """Return the names of its projections; refuse what is not attention as these models have it."""
    name = type(attention).__name__
    package = type(attention).__module__.rpartition(".")[0]
    if package not in {f"transformers.models.{family}" for family in (*FAMILIES, *SWIN)}:
        raise UserError(
            f"{path} is {name}, not transformers' own, so what a mixer in its place would lose is "
            "not known"
        )
    if patched(attention):
        raise UserError(f"the forward of {path} ({name}) was replaced: {UNKNOWN}")
    refuse_adapter(path, attention)
    row = row_of(attention)
    inner = {n: m for n, m in attention.named_modules() if not any(m.children())}
    parts = {
        name: module
        for name, module in inner.items()
        if not isinstance(module, nn.Dropout) and "position_bias" not in name  # Swin's
    }
    if row is None or parts.keys() != set(row):
        raise UserError(
            f"{path} holds {', '.join(parts)}, where keymix knows {', '.join(row or ROWS[0])}; "
            f"take transformers {SINCE} or later"
        )
    for part, module in parts.items():
        if type(module) is not nn.Linear:
            raise UserError(
                f"{path}.{part} is {type(module).__name__}, not a plain Linear, so what a mixer in "
                "its place would lose is not known"
            )
    return row


def _bias(mask: Any, x: Tensor) -> Tensor | None:
    """Turn the mask that a layer is handed into an additive one; booleans say who may attend."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise UserError(
            "the model's attention implementation hands its layers a mask that is no tensor "
            "[B, 1, N, N]; choose another: model.set_attn_implementation('sdpa')"
        )
    return additive_mask(mask, x)


HOSTS = (HuggingFaceViT(),)
