# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's VisionTransformer: attention sits at ``blocks.<i>.attn``."""

from __future__ import annotations

from typing import Any

from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from torch import nn

from keymix.hosts.blocks import BlockHost


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


HOST = TimmViT()
