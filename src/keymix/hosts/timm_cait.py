# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's Cait: patch attention sits at ``blocks.<i>.attn``, class attention stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from timm.models.cait import Cait, TalkingHeadAttn
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import Host, Place
from keymix.hosts.hosted import HostedMixer
from keymix.mixers.base import Site, TokenMixer


class TimmCait(Host):
    """timm's Cait. The class token enters after the patch blocks, so their sites have no prefix.

    Heads talk in CaiT: mixers that know ``talking_heads`` get them, with a bias after the softmax
    where the model has one. (A bias before the softmax shifts all logits of a row alike, so it
    does nothing and is left out.)
    """

    name = "timm Cait"
    parts: ClassVar[dict[str, str | None]] = {
        "proj_l.weight": "talking_pre.weight",
        "proj_l.bias": None,
        "proj_w.weight": "talking_post.weight",
        "proj_w.bias": "talking_post.bias",
    }

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        return isinstance(model, Cait) and all(
            isinstance(getattr(block, "attn", None), (TalkingHeadAttn, HostedMixer))
            for block in model.blocks
        )

    def places(self, model: nn.Module) -> list[Place]:
        """One place a patch block."""
        if not isinstance(model, Cait):
            raise UserError(f"{type(model).__name__} is not timm's Cait")
        grid = (model.patch_embed.grid_size[0], model.patch_embed.grid_size[1])
        return [
            Place(
                path=f"blocks.{i}.attn",
                stage=0,
                site=self._site(block.attn, model, grid),
                defaults=self._defaults(block.attn),
            )
            for i, block in enumerate(model.blocks)
        ]

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as timm's Cait initialises its own."""
        assert isinstance(model, Cait)
        for linear in mixer.projections:
            model._init_weights(linear)
        before = model.get_submodule(place.path)
        model.set_submodule(place.path, HostedMixer(mixer, place).train(before.training))

    @staticmethod
    def _site(attention: Any, model: Any, grid: tuple[int, int]) -> Site:
        if isinstance(attention, HostedMixer):
            return replace(attention.place.site, grid=grid)
        return Site(dim=model.embed_dim, num_heads=attention.num_heads, grid=grid)

    @staticmethod
    def _defaults(attention: Any) -> Mapping[str, Any]:
        if isinstance(attention, HostedMixer):
            return attention.place.defaults
        return {
            "qkv_bias": attention.qkv.bias is not None,
            "proj_bias": attention.proj.bias is not None,
            "attn_drop": attention.attn_drop.p,
            "proj_drop": attention.proj_drop.p,
            "talking_heads": True if attention.proj_w.bias is None else "bias",
        }


HOST = TimmCait()
