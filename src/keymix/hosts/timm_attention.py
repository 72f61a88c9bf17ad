# SPDX-License-Identifier: Apache-2.0
"""Adapter to any model that holds timm's plain or rotary attention, wherever it sits."""

from __future__ import annotations

from typing import Any

from timm.layers import Attention, AttentionRope, trunc_normal_
from timm.models.eva import EvaAttention
from torch import nn

from keymix.hosts.blocks import BlockHost
from keymix.hosts.hosted import HostedMixer
from keymix.hosts.timm_heads import first_projection, takes_rope
from keymix.mixers.base import Grid


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


HOST = TimmAttention()
