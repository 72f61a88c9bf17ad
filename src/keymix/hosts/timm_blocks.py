# SPDX-License-Identifier: Apache-2.0
"""Adapters to timm's models of plain blocks (ViT, EVA, BEiT, CaiT), and to others with such blocks.

Attention sits at ``blocks.<i>.attn``, on one grid of patches; in other models it may sit anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.layers import Attention, AttentionRope, trunc_normal_
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.cait import Cait, TalkingHeadAttn
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import Place, patched
from keymix.hosts.blocks import POSITIONS, BlockHost, Facts
from keymix.hosts.call_grid import CallGrid
from keymix.hosts.head_norms import PARTS, head_norms_of
from keymix.hosts.hosted import HostedMixer, HostedRope
from keymix.hosts.timm_heads import (
    first_projection,
    joined_projections,
    named_call,
    own_weights,
    projections_of,
    read_call,
    takes_rope,
)
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.map_mixer import MapMixer


class TimmBlocks(BlockHost):
    """A host of timm's whose blocks are ``model.blocks`` and call their ``attn`` alike."""

    model: ClassVar[type[nn.Module]]  # timm's class
    attention: ClassVar[tuple[type[nn.Module], ...]]  # what its blocks hold
    hosted = HostedMixer
    parts: ClassVar[Mapping[str, str | None]] = PARTS

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        blocks: Any = getattr(model, "blocks", ())
        return isinstance(model, self.model) and all(
            self.knows(getattr(block, "attn", None)) for block in blocks
        )

    def knows(self, attention: nn.Module | None) -> bool:
        """Whether it is an attention of this family, which computes what timm's class does."""
        return type(attention) in (self.hosted, HostedRope) or any(
            isinstance(attention, kind)
            and type(attention).forward is kind.forward
            and not patched(attention)
            for kind in self.attention
        )

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of the attention modules, in the order of the forward pass."""
        if not isinstance(model, self.model):
            raise UserError(f"{type(model).__name__} is no model of {self.name}")
        blocks: Any = model.blocks
        return [f"blocks.{i}.attn" for i in range(len(blocks))]

    def facts(self, model: nn.Module, path: str) -> Facts:
        """Describe timm's attention."""
        attention: Any = model.get_submodule(path)
        return Facts(
            dim=first_projection(attention).in_features,
            num_heads=attention.num_heads,
            options={**projections_of(attention), **self.own_defaults(attention)},
            norms=head_norms_of(attention, rotary=self.rotary(model, attention)),
        )

    def kind_for(self, before: nn.Module) -> type[HostedMixer]:
        """Hand on rotary positions where calls may bring some."""
        return HostedRope if takes_rope(before) else self.hosted

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what the family's own attention makes of a call."""
        return read_call(attention, args, kwargs)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the own projections of the family's attention, by their role in a mixer."""
        return own_weights(attention)

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join projections that are apart, and EVA's biases, as a mixer has them."""
        return joined_projections(tensors)

    def embed(self, model: Any, path: str) -> nn.Module | None:
        """Return what cuts images into the patches that an attention meets, None if unknown."""
        embed: nn.Module = model.patch_embed
        return embed

    def grid(self, model: Any, attention: nn.Module, path: str) -> Grid | None:
        """Return the grid of patches that an attention meets, None if unknown."""
        rows, columns = model.patch_embed.grid_size
        return rows, columns

    def rotary(self, model: Any, attention: nn.Module) -> str | None:
        """Say what the rotary positions are called that calls of attention bring."""
        return None

    def own_defaults(self, attention: Any) -> Mapping[str, Any]:
        """Options that the host's own attention has besides biases and dropouts."""
        return {}


class TimmViT(TimmBlocks):
    """timm's VisionTransformer (ViT, DeiT and what else is built on it)."""

    name = "timm VisionTransformer"
    model = VisionTransformer
    attention = (Attention,)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model's way of starting says."""
        mode = str(getattr(model, "weight_init_mode", ""))
        get_init_weights_vit(mode, needs_reset=False)(linear, path)

    def prefix(self, model: Any, path: str) -> int:
        """Count class and register tokens."""
        return int(model.num_prefix_tokens)


class TimmEva(TimmBlocks):
    """timm's Eva. Rotary positions of a call turn queries and keys of the mixer.

    Learned keys are not turned: they live where turned queries do. EVA has no bias of keys next to
    those of queries and values; a mixer has all three or none. Where heads share keys and values
    in groups, a mixer's heads each have their own.
    """

    name = "timm Eva"
    model = Eva
    attention: ClassVar[tuple[type[nn.Module], ...]] = (EvaAttention, AttentionRope)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws its own."""
        assert isinstance(model, Eva | Beit)
        model._init_weights(linear, needs_reset=False)

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there; the output projection starts the smaller, the deeper the block."""
        super().put(model, place, mixer)
        depth = int(place.path.split(".")[1]) + 1
        for linear in mixer.projections[-1:]:
            with torch.no_grad():
                linear.weight.div_(math.sqrt(2.0 * depth))

    def prefix(self, model: Any, path: str) -> int:
        """Count class and register tokens."""
        return int(model.num_prefix_tokens)

    def rotary(self, model: Any, attention: nn.Module) -> str | None:
        """Name the rotary positions of models that have some."""
        return None if model.rope is None else "rotary positions"


class TimmCait(TimmBlocks):
    """timm's Cait. The class token enters after the patch blocks, so their sites have no prefix.

    Heads talk in CaiT: mixers that know ``talking_heads`` get them, with a bias after the softmax
    where the model has one. (A bias before the softmax shifts all logits of a row alike, so it
    does nothing and is left out.)
    """

    name = "timm Cait"
    model = Cait
    attention = (TalkingHeadAttn,)
    parts: ClassVar[dict[str, str | None]] = {
        "proj_l.weight": "talking_pre.weight",
        "proj_l.bias": None,
        "proj_w.weight": "talking_post.weight",
        "proj_w.bias": "talking_post.bias",
    }

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as timm's Cait draws its own."""
        assert isinstance(model, Cait)
        model._init_weights(linear)

    def prefix(self, model: Any, path: str) -> int:
        """There are none."""
        return 0

    def own_defaults(self, attention: Any) -> Mapping[str, Any]:
        """Heads that talk, with a bias after the softmax where the model has one."""
        return {"talking_heads": True if attention.proj_w.bias is None else "bias"}

    def reading(self, attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
        """Return what talking-heads attention makes of a call."""
        read = read_call(attention, args, kwargs)
        return replace(read, pre=attention.proj_l, post=attention.proj_w)

    def weights(self, attention: Any) -> dict[str, Tensor]:
        """Return projections and what lets heads talk; the idle bias is left out."""
        found = own_weights(attention)
        for theirs, name in self.parts.items():
            linear = attention.get_submodule(theirs.partition(".")[0])
            tensor = getattr(linear, theirs.rpartition(".")[2])
            if name is not None and tensor is not None:
                found[name] = tensor.detach()
        return found


class HostedBeit(HostedMixer):
    """Stands where BEiT's attention stood; its table of relative positions stays, by its names.

    A mixer without a map has no use for the table, and it goes.
    """

    k_bias = None
    _get_rel_pos_bias = BeitAttention._get_rel_pos_bias
    _init_buffers = BeitAttention._init_buffers
    init_non_persistent_buffers = BeitAttention.init_non_persistent_buffers
    set_window_size = BeitAttention.set_window_size

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__(mixer, place, call, before)
        self.num_heads = before.num_heads
        kept = before if isinstance(mixer, MapMixer) else None
        self.window_size = getattr(kept, "window_size", None)
        table = getattr(kept, "relative_position_bias_table", None)
        self.register_parameter("relative_position_bias_table", table)
        index = getattr(kept, "relative_position_index", None)
        self.register_buffer("relative_position_index", index, persistent=False)

    def forward(  # type: ignore[override]  # timm's BEiT calls it
        self, x: Tensor, shared_rel_pos_bias: Tensor | None = None
    ) -> Tensor:
        """Mix the tokens, relative positions added to the logits of a mixer that has some."""
        bias = _relative_positions(self, shared_rel_pos_bias)
        has = isinstance(self.mixer, MapMixer)
        out: Tensor = self.mixer(x, grid=self.grid_of(x), bias=bias if has else None)
        return out


def _relative_positions(attention: Any, shared: Tensor | None) -> Tensor | None:
    """Return what BEiT adds to logits: positions of a block's own, or those of all blocks."""
    if attention.relative_position_bias_table is None:
        return shared
    own: Tensor = attention._get_rel_pos_bias()
    return own if shared is None else own + shared


class TimmBeit(TimmEva):
    """timm's Beit (BEiT, BEiT v2), whose blocks add relative positions to their logits."""

    name = "timm Beit"
    model = Beit
    attention = (BeitAttention,)
    hosted = HostedBeit

    def facts(self, model: Any, path: str) -> Facts:
        """Describe timm's attention, with its relative positions."""
        attention = model.get_submodule(path)
        positions = (attention.relative_position_bias_table, model.rel_pos_bias)
        extras = (POSITIONS,) if any(p is not None for p in positions) else ()
        return replace(super().facts(model, path), extras=extras)

    def rotary(self, model: Any, attention: nn.Module) -> None:
        """It has no rotary positions."""

    def reading(self, attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
        """Return what attention makes of a call, relative positions as its bias."""
        shared = named_call(attention, args, kwargs)["shared_rel_pos_bias"]
        read = read_call(attention, args, kwargs)
        return replace(read, bias=_relative_positions(attention, shared))


class TimmAttention(TimmBlocks):
    """Any model built of timm's ``Attention``, ``AttentionRope`` or ``EvaAttention``.

    It is asked when no other adapter serves. Patches are those of the nearest module around an
    attention with timm's ``patch_embed``, if their width is the attention's; otherwise the grid is
    unknown, and mixers that need one cannot sit. Attention of other kinds is left alone; a model
    with a subclass of timm's that computes something else is not served.
    """

    name = "models that hold timm's Attention, AttentionRope or EvaAttention"
    attention = (Attention, AttentionRope, EvaAttention)
    generic = True

    def serves(self, model: nn.Module) -> bool:
        """Whether it holds such attention, and none that only looks like it."""
        kin = [m for m in model.modules() if isinstance(m, (*self.attention, HostedMixer))]
        return bool(kin) and model not in kin and all(self.knows(m) for m in kin)

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of attention in the order in which the model holds it."""
        return [path for path, module in model.named_modules() if path and self.knows(module)]

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as timm's transformers do: truncated normal, 0.02."""
        trunc_normal_(linear.weight, std=0.02)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)

    def embed(self, model: nn.Module, path: str) -> nn.Module | None:
        """Return the nearest patch embedding around an attention."""
        owner = _owner(model, path)
        return None if owner is None else owner.patch_embed

    def grid(self, model: nn.Module, attention: Any, path: str) -> Grid | None:
        """Return the grid of the nearest patch embedding, if its patches are as wide."""
        owner = _owner(model, path)
        if owner is None:
            return BlockHost.grid(self, model, attention, path)
        if self._prefix(owner) is None:
            return None
        if isinstance(attention, HostedMixer):
            width = attention.mixer.site.dim
            if attention.place.site.grid is None:
                return None
        else:
            width = first_projection(attention).in_features
        if getattr(owner, "embed_dim", width) != width:
            return None
        rows, columns = owner.patch_embed.grid_size
        return rows, columns

    def prefix(self, model: nn.Module, path: str) -> int | None:
        """Count prefix tokens: as the nearest module around says, or by a position embedding."""
        owner = _owner(model, path)
        while path:
            path = path.rpartition(".")[0]
            around = model.get_submodule(path)
            known = getattr(around, "num_prefix_tokens", None)
            if isinstance(known, int):
                return known
            if around is owner:
                return self._prefix(owner)
        return BlockHost.prefix(self, model, path)

    def rotary(self, model: Any, attention: nn.Module) -> str | None:
        """Name the rotary positions of attention that takes some."""
        return "rotary positions" if takes_rope(attention) else None

    @staticmethod
    def _prefix(owner: Any) -> int | None:
        known = getattr(owner, "num_prefix_tokens", None)
        if isinstance(known, int):
            return known
        positions: Any = getattr(owner, "pos_embed", None)
        rows, columns = owner.patch_embed.grid_size
        if not hasattr(positions, "shape") or len(positions.shape) != 3:
            return None
        count = positions.shape[1] - rows * columns
        return count if count >= 0 else None


def _owner(model: nn.Module, path: str) -> Any:
    """Nearest module around a path that cuts images into patches on a known grid, else None."""
    while path:
        path = path.rpartition(".")[0]
        module: Any = model.get_submodule(path)
        if getattr(getattr(module, "patch_embed", None), "grid_size", None) is not None:
            return module
    return None


HOSTS = (TimmViT(), TimmEva(), TimmBeit(), TimmCait(), TimmAttention())
