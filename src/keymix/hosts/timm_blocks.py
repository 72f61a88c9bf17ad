# SPDX-License-Identifier: Apache-2.0
"""Adapters to timm's models of plain blocks: ViT, EVA, CaiT, and whatever holds their attention.

Attention sits at ``blocks.<i>.attn``, on one grid of patches; in other models it may sit anywhere.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.layers import Attention, AttentionRope, trunc_normal_
from timm.models.cait import Cait, TalkingHeadAttn
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.hosts.base import Host, Place, layout_on, patched
from keymix.hosts.call_grid import CallGrid, attach_call_hook, call_hook_of
from keymix.hosts.head_norms import PARTS, HeadNorms, head_norms_of
from keymix.hosts.hosted import HostedMixer, HostedRope
from keymix.hosts.timm_heads import (
    first_projection,
    joined_projections,
    own_weights,
    projections_of,
    read_call,
    takes_rope,
)
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer


class BlockHost(Host):
    """A host of one stage, whose blocks are ``model.blocks`` and call their ``attn`` alike."""

    model: ClassVar[type[nn.Module]]  # timm's class
    attention: ClassVar[tuple[type[nn.Module], ...]]  # what its blocks hold
    parts: ClassVar[Mapping[str, str | None]] = PARTS

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        blocks: Any = getattr(model, "blocks", ())
        return isinstance(model, self.model) and all(
            self.knows(getattr(block, "attn", None)) for block in blocks
        )

    def knows(self, attention: nn.Module | None) -> bool:
        """Whether it is an attention of this family, which computes what timm's class does."""
        return isinstance(attention, HostedMixer) or any(
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

    def places(self, model: nn.Module) -> list[Place]:
        """One place an attention."""
        return [self._place(model, path) for path in self.paths(model)]

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Return the place's site; refuse other heads where the host's own pass through more."""
        site = place.site
        if site.post_projection is None or not issubclass(mixer, MapMixer):
            return site
        own = (site.num_heads, place.defaults.get("head_dim", site.dim // site.num_heads))
        heads = options.get("num_heads", own[0])
        width = options.get("head_dim") or site.dim // heads
        if (heads, width) != own:
            raise UserError(
                f"{place.path} has {' and '.join(place.extras)} for {own[0]} heads of {own[1]} "
                f"channels, and mixer {mixer.mixer_name!r} would have {heads} of {width}; leave "
                "num_heads and head_dim as the model has them"
            )
        return site

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as timm initialises attention's."""
        for linear in mixer.projections:
            self.initialise(model, linear, place.path)
        embed = self.embed(model, place.path)
        call = CallGrid() if embed is None else attach_call_hook(embed, CallGrid())
        block = model.get_submodule(place.path.rpartition(".")[0])
        before = model.get_submodule(place.path)
        call.keep_at(block)
        hosted = HostedRope if takes_rope(before) else HostedMixer
        model.set_submodule(place.path, hosted(mixer, place, call).train(before.training))

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

    def follow_calls(self, model: nn.Module) -> None:
        """Record the grid of patches of every call, from now on."""
        for path in self.paths(model):
            embed = self.embed(model, path)
            if embed is not None:
                attach_call_hook(embed, CallGrid())

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the patches of the model's last call lie; the prefix lies nowhere."""
        embed = self.embed(model, place.path)
        call = None if embed is None or place.site.grid is None else call_hook_of(embed, CallGrid)
        grid = call.grid if call is not None else None
        return layout_on(model, place, grid or place.site.grid)

    def update_grids(self, model: nn.Module) -> None:
        """Update all mixers to the grid of patches that the model has now."""
        super().update_grids(model)
        for path in self.paths(model):
            embed = self.embed(model, path)
            if embed is not None:
                attach_call_hook(embed, CallGrid()).grid = None  # that of a call before

    @abstractmethod
    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws those of its own attention."""

    def embed(self, model: Any, path: str) -> nn.Module | None:
        """Return what cuts images into the patches that an attention meets, None if unknown."""
        embed: nn.Module = model.patch_embed
        return embed

    def grid(self, model: Any, attention: nn.Module, path: str) -> Grid | None:
        """Return the grid of patches that an attention meets, None if unknown."""
        rows, columns = model.patch_embed.grid_size
        return rows, columns

    def prefix(self, model: Any, path: str) -> int | None:
        """Count the prefix tokens that an attention meets, None if unknown."""
        return 0

    def rotary(self, model: Any, attention: nn.Module) -> str | None:
        """Say what the rotary positions are called that calls of attention bring."""
        return None

    def own_defaults(self, attention: Any) -> Mapping[str, Any]:
        """Options that the host's own attention has besides biases and dropouts."""
        return {}

    def _place(self, model: nn.Module, path: str) -> Place:
        attention: Any = model.get_submodule(path)
        grid = self.grid(model, attention, path)
        if isinstance(attention, HostedMixer):
            before = attention.place
            norms = before.site.post_projection
            if isinstance(norms, HeadNorms):
                norms = norms.after(attention.mixer, next(model.parameters()))
            return replace(before, site=replace(before.site, grid=grid, post_projection=norms))
        prefix = self.prefix(model, path)
        norms = head_norms_of(attention, rotary=self.rotary(model, attention))
        site = Site(
            dim=first_projection(attention).in_features,
            num_heads=attention.num_heads,
            grid=grid,
            num_prefix_tokens=prefix or 0,
            post_projection=norms,
        )
        return Place(
            path=path,
            stage=0,
            site=site,
            defaults={**projections_of(attention), **self.own_defaults(attention)},
            extras=() if norms is None else norms.extras,
            prefix_known=prefix is not None,
        )


class TimmViT(BlockHost):
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


class TimmEva(BlockHost):
    """timm's Eva. Rotary positions of a call turn queries and keys of the mixer.

    Learned keys are not turned: they live where turned queries do. EVA has no bias of keys next to
    those of queries and values; a mixer has all three or none. Where heads share keys and values
    in groups, a mixer's heads each have their own.
    """

    name = "timm Eva"
    model = Eva
    attention = (EvaAttention, AttentionRope)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as timm's Eva draws its own."""
        assert isinstance(model, Eva)
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


class TimmCait(BlockHost):
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


class TimmAttention(BlockHost):
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
        if owner is None or self._prefix(owner) is None:
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
        return None

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


HOSTS = (TimmViT(), TimmEva(), TimmCait(), TimmAttention())
