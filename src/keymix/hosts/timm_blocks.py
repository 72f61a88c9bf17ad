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
from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.cait import Cait, TalkingHeadAttn
from timm.models.eva import Eva, EvaAttention
from timm.models.maxxvit import Attention2d, AttentionCl
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.hosts.base import Place, layout_on, patched
from keymix.hosts.blocks import POSITIONS, BlockHost, Facts
from keymix.hosts.call_grid import CALL_SIZE, CallGrid, CallSize, attach_call_hook
from keymix.hosts.head_norms import PARTS, head_norms_of
from keymix.hosts.hosted import HostedMixer, HostedPositions, HostedRope
from keymix.hosts.timm_heads import (
    input_format,
    joined_projections,
    keeps_width,
    own_weights,
    projections_of,
    read_call,
    takes_rope,
    width_of,
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
        return type(attention) in (self.hosted, HostedRope, HostedPositions) or any(
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
        own, shared = (
            ("rel_pos", "relative_position_bias_table"),
            ("rel_pos_bias", "shared_rel_pos"),
        )
        both = [(attention, name) for name in own] + [(model, name) for name in shared]
        positions = any(getattr(module, name, None) is not None for module, name in both)
        return Facts(
            dim=width_of(attention),
            num_heads=attention.num_heads,
            options={**projections_of(attention), **self.own_defaults(attention)},
            norms=head_norms_of(attention, rotary=self.rotary(model, attention)),
            extras=(POSITIONS,) if positions else (),
        )

    def kind_for(self, before: nn.Module) -> type[HostedMixer]:
        """Hand on rotary positions where calls may bring some, and keep relative ones."""
        if self.hosted is HostedMixer and hasattr(before, "rel_pos"):
            return HostedPositions
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

    def rotary(self, model: Any, attention: nn.Module) -> str | None:
        """Name the rotary positions of models that have some."""
        return None if getattr(model, "rope", None) is None else "rotary positions"


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


class HostedBeit(HostedPositions):
    """The same for BEiT, whose attention resizes its table itself."""

    k_bias = None
    _init_buffers = BeitAttention._init_buffers
    init_non_persistent_buffers = BeitAttention.init_non_persistent_buffers
    set_window_size = BeitAttention.set_window_size

    def __init__(self, mixer: TokenMixer, place: Place, call: CallGrid, before: Any) -> None:
        super().__init__(mixer, place, call, before)
        self.num_heads = before.num_heads
        self.window_size = before.window_size if isinstance(mixer, MapMixer) else None


class TimmBeit(TimmEva):
    """timm's Beit (BEiT, BEiT v2), whose blocks add relative positions to their logits."""

    name = "timm Beit"
    model = Beit
    attention = (BeitAttention,)
    hosted = HostedBeit


class TimmAttention(TimmBlocks):
    """Any model built of timm's ``Attention`` or its like, rotary or with relative positions.

    It is asked when no other adapter serves. Patches are those of the nearest module around an
    attention with timm's ``patch_embed``, if their width is the attention's; otherwise the grid is
    unknown, and mixers that need one cannot sit. Relative positions say it, too; in MaxViT it is
    that of a window, and learned keys serve all windows. Attention of other kinds, or that changes
    the width (CoAtNet's first of a stage), is left alone; a model with a subclass of timm's that
    computes something else is not served.
    """

    name = "models that hold timm's Attention, AttentionRope or EvaAttention"
    attention = (Attention, AttentionRope, EvaAttention, RelPosAttention, AttentionCl, Attention2d)
    generic = True

    def serves(self, model: nn.Module) -> bool:
        """Whether it holds such attention, and none that only looks like it."""
        kin = [m for m in model.modules() if isinstance(m, (*self.attention, HostedMixer))]
        known = model not in kin and all(self.knows(m) for m in kin)
        return known and bool(self.paths(model))

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of attention in the order in which the model holds it."""
        known = ((p, m) for p, m in model.named_modules() if p and self.knows(m))
        return [path for path, m in known if isinstance(m, HostedMixer) or keeps_width(m)]

    def embed(self, model: nn.Module, path: str) -> nn.Module | None:
        """Return the nearest patch embedding around an attention."""
        owner = _owner(model, path)
        return None if owner is None else owner.patch_embed

    def grid(self, model: nn.Module, attention: Any, path: str) -> Grid | None:
        """Return the grid of the nearest patch embedding, if its patches are as wide."""
        owner, positions = _owner(model, path), getattr(attention, "rel_pos", None)
        hosted = isinstance(attention, HostedMixer)
        if positions is not None:
            return positions.window_size[0], positions.window_size[1]
        if owner is None:
            said = BlockHost.grid(self, model, attention, path)
            return attention.place.site.grid if said is None and hosted else said
        width = attention.place.site.dim if hosted else width_of(attention)
        nowhere = hosted and attention.place.site.grid is None
        if nowhere or self._prefix(owner) is None or getattr(owner, "embed_dim", width) != width:
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

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the patches of the last call lie; in MaxViT's windows that is not known."""
        inside = _partition(model, place.path) is not None
        return layout_on(model, place, None) if inside else super().layout(model, place)

    def _followed(self, model: nn.Module, path: str) -> CallGrid | None:
        around, attention = _partition(model, path), model.get_submodule(path)
        if around is not None:
            axis = -2 if input_format(attention) == "images" else -3
            setattr(attention, CALL_SIZE, attach_call_hook(around, CallSize(axis)))
        return super()._followed(model, path)

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


def _partition(model: nn.Module, path: str) -> nn.Module | None:
    """Return the block around an attention that parts maps into windows, None if none does."""
    around = model.get_submodule(path.rpartition(".")[0])
    return around if hasattr(around, "partition_size") else None


def _owner(model: nn.Module, path: str) -> Any:
    """Nearest module around a path that cuts images into patches on a known grid, else None."""
    while path:
        path = path.rpartition(".")[0]
        module: Any = model.get_submodule(path)
        if getattr(getattr(module, "patch_embed", None), "grid_size", None) is not None:
            return module
    return None


HOSTS = (TimmViT(), TimmEva(), TimmBeit(), TimmCait(), TimmAttention())
