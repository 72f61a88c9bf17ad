# SPDX-License-Identifier: Apache-2.0
"""Adapter to torchvision's MaxVit: attention in windows and across them, with a table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit, RelativePositionalMultiHeadAttention

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout, Reading, relative_positions
from keymix.hosts.base import UNKNOWN, Place, layout_on, patched
from keymix.hosts.blocks import POSITIONS, BlockHost, Facts
from keymix.hosts.hosted import HostedPositions
from keymix.hosts.projections import facts_of, read_row, weights_of
from keymix.mixers.base import Grid

ROW = ("to_qkv", "to_qkv", "to_qkv", "merge")


class TorchvisionMaxVit(BlockHost):
    """torchvision's MaxVit. Learned keys serve all windows of a layer, or all sets across them."""

    name = "torchvision MaxVit"
    hosted = HostedPositions

    def serves(self, model: nn.Module) -> bool:
        """Whether it is torchvision's class."""
        return isinstance(model, MaxVit)

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of attention in the order of the forward pass."""
        kinds = RelativePositionalMultiHeadAttention, HostedPositions
        return [path for path, module in model.named_modules() if isinstance(module, kinds)]

    def facts(self, model: nn.Module, path: str) -> Facts:
        """Describe the host's own attention."""
        own: Any = model.get_submodule(path)
        if patched(own):
            raise UserError(f"the forward of {path} ({type(own).__name__}) was replaced: {UNKNOWN}")
        return facts_of(own, ROW, own.n_heads, {"scale": "dim"}, extras=(POSITIONS,))

    def grid(self, model: nn.Module, attention: Any, path: str) -> Grid | None:
        """Return the grid of a window, or of the tokens as far apart as windows."""
        if isinstance(attention, HostedPositions):
            return attention.place.site.grid
        return attention.size, attention.size

    def prefix(self, model: nn.Module, path: str) -> int:
        """There are none."""
        return 0

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Refuse to say where these lie on the image."""
        return layout_on(model, place, None)

    def reading(self, attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
        """Return queries, keys and values of a call, ``[B, windows, h, N, d]``."""
        x: Tensor = args[0] if args else kwargs["x"]
        read = read_row(attention, ROW, x, attention.head_dim, attention.scale_factor)
        return replace(read, bias=relative_positions(attention))

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections; ``to_qkv`` is split."""
        return weights_of(attention, ROW)


HOSTS = (TorchvisionMaxVit(),)
