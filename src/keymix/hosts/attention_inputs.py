# SPDX-License-Identifier: Apache-2.0
"""What an attention makes of one call, whoever wrote it, and where its tokens lie on the image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keymix.mixers.base import Grid, Stage, check_stage, take_rows


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Queries, keys and values of one call, as they meet.

    Attributes:
        q: Queries ``[*, h, N, d]``, after norms and rotation, unscaled.
        k: Keys ``[*, h, M, d]``, likewise; ``[h, M, d]`` where they are learned.
        v: Values ``[*, h, M, e]``.
        scale: Factor of the products.
        bias: Added to the scaled logits, broadcastable to ``[*, h, N, M]``: relative positions,
            masks.
        pre: Mixes the heads' logits (CaiT), ``[h] -> [h]``.
        post: Mixes the heads' maps, likewise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | Tensor
    bias: Tensor | None = None
    pre: nn.Linear | None = None
    post: nn.Linear | None = None

    def logits(self, rows: Tensor | None = None) -> Float[Tensor, "*batch h Q M"]:
        """Return scaled logits with their bias, before heads mix.

        Args:
            rows: Indices of query tokens; all if None.
        """
        logits = take_rows(self.q, rows) @ self.k.mT * self.scale
        return logits if self.bias is None else logits + take_rows(self.bias, rows)

    def map(
        self, rows: Tensor | None = None, stage: Stage = "softmax"
    ) -> Float[Tensor, "*batch h Q M"]:
        """Return the attention map, without dropout.

        Args:
            rows: Indices of query tokens; all if None.
            stage: ``"softmax"``, or ``"final"`` for the map that multiplies V.
        """
        check_stage(stage)
        a = _mixed(self.logits(rows), self.pre).softmax(-1)
        return a if stage == "softmax" else _mixed(a, self.post)


def _mixed(maps: Tensor, mix: nn.Linear | None) -> Tensor:
    if mix is None:
        return maps
    mixed: Tensor = mix(maps.movedim(-3, -1))
    return mixed.movedim(-1, -3)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tokens and keys of a layer lie on the image.

    Attributes:
        grid: All patch tokens of the image (H, W) in this layer.
        key_grid: Where keys lie; the same unless they are strided or pooled.
        prefix: Prefix tokens, which stand first.
        window: Size of a window in tokens, None where every token sees the image.
        windows: Rows and columns of windows; the last are padded where windows do not
            divide the grid.
        shift: Tokens by which the image is rolled up and left before it is cut into windows.
        pads_first: Whether the image is padded before it is rolled (torchvision), not after.
        image: Height and width of the image as shares of what the grid covers; the rest is padding
            at the bottom and the right, by the model, of the image.
        class_token: Whether the first of the prefix tokens is a class token.
    """

    grid: Grid
    key_grid: Grid
    prefix: int = 0
    window: Grid | None = None
    windows: Grid | None = None
    shift: Grid = (0, 0)
    pads_first: bool = False
    image: tuple[float, float] = (1.0, 1.0)
    class_token: bool = False


def positions_in(attention: nn.Module) -> Any:
    """Return the module of an attention, or of what hosts a mixer, that has its positions."""
    return next((m for m in attention.modules() if hasattr(m, "relative_position_index")), None)


def network_in(positions: Any) -> nn.Module | None:
    """Return the network that makes a bias of log-spaced coordinates (Swin V2), None without."""
    found: nn.Module | None = getattr(positions, "cpb_mlp", None)
    return found or getattr(positions, "continuous_position_bias_mlp", None)


def relative_positions(attention: Any, shared: Tensor | None = None) -> Tensor | None:
    """Return what is added to logits by relative position, ``[heads or 1, N, N]``, None if nothing.

    It is what the attention's own module says (timm's ``rel_pos``), or a table's, or 16 sigmoids of
    a network's, which has a row a distance as a table has; ``shared`` is that of all blocks.
    """
    there, own = positions_in(attention), getattr(attention, "rel_pos", None)
    network, table = network_in(there), getattr(there, "relative_position_bias_table", None)
    if network is not None:
        table = 16 * network(there.relative_coords_table).flatten(0, 2).sigmoid()
    if own is not None:
        bias: Tensor = own.get_bias()
    elif table is not None:
        side = math.isqrt(there.relative_position_index.numel())
        bias = table[there.relative_position_index.reshape(side, side)].permute(2, 0, 1)
    else:
        return shared
    return bias if shared is None else bias + shared
