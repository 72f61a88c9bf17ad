# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's VisionTransformer: attention sits at ``blocks.<i>.attn``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from torch import nn

from keymix.errors import UserError
from keymix.hosts.base import Host, Place
from keymix.hosts.hosted import HostedMixer
from keymix.mixers.base import Site, TokenMixer


class TimmViT(Host):
    """timm's VisionTransformer (ViT, DeiT and what else is built on it)."""

    name = "timm VisionTransformer"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        return isinstance(model, VisionTransformer) and all(
            isinstance(getattr(block, "attn", None), (Attention, HostedMixer))
            for block in model.blocks
        )

    def places(self, model: nn.Module) -> list[Place]:
        """One place a block."""
        if not isinstance(model, VisionTransformer):
            raise UserError(f"{type(model).__name__} is not timm's VisionTransformer")
        grid = model.patch_embed.grid_size
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
        """Put the mixer there, its projections initialised as timm initialises attention's."""
        initialise = get_init_weights_vit(getattr(model, "weight_init_mode", ""), needs_reset=False)
        for linear in mixer.projections:
            initialise(linear, place.path)
        before = model.get_submodule(place.path)
        model.set_submodule(place.path, HostedMixer(mixer, place).train(before.training))

    @staticmethod
    def _site(attention: Any, model: Any, grid: tuple[int, int]) -> Site:
        if isinstance(attention, HostedMixer):
            return replace(attention.place.site, grid=(grid[0], grid[1]))
        return Site(
            dim=model.embed_dim,
            num_heads=attention.num_heads,
            grid=(grid[0], grid[1]),
            num_prefix_tokens=model.num_prefix_tokens,
        )

    @staticmethod
    def _defaults(attention: Any) -> Mapping[str, Any]:
        if isinstance(attention, HostedMixer):
            return attention.place.defaults
        return {
            "qkv_bias": attention.qkv.bias is not None,
            "proj_bias": attention.proj.bias is not None,
            "attn_drop": attention.attn_drop.p,
            "proj_drop": attention.proj_drop.p,
        }


HOST = TimmViT()
