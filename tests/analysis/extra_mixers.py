# SPDX-License-Identifier: Apache-2.0
"""Mixers that exist only for tests of tables over all mixers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers import registry
from keymix.mixers.base import Grid, Site, TokenMixer, Traits


class _Linear(TokenMixer):
    """One square matrix on every token."""

    traits = Traits(mixes_prefix=False)

    def __init__(self, site: Site, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(site)
        self.fc = nn.Linear(site.dim, site.dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: Grid | None = None, bias: Tensor | None = None) -> Tensor:
        out: Tensor = self.fc(x)
        return out


class SquareOnly(_Linear):
    """Cannot be built where the grid is no square."""

    def __init__(self, site: Site) -> None:
        grid = site.grid
        if grid is not None and grid[0] != grid[1]:
            raise UserError(f"only squares here, not {grid}")
        super().__init__(site)


class Fails(_Linear):
    """Can be built and counted, and fails on real numbers."""

    def forward(self, x: Tensor, grid: Grid | None = None, bias: Tensor | None = None) -> Tensor:
        if type(x) is Tensor and not x.is_meta and x.shape[-2] == 6:
            raise RuntimeError("no six tokens\nand more lines")
        return super().forward(x)


class NeedsNumbers(_Linear):
    """Looks at numbers when it is built, so that it cannot be built without memory."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if float(torch.ones(2).sum()) != 2:
            raise UserError("impossible")


class Uncounted(_Linear):
    """Runs an operation without a formula."""

    def forward(self, x: Tensor, grid: Grid | None = None, bias: Tensor | None = None) -> Tensor:
        return super().forward(x) + torch.linalg.inv_ex(self.fc.weight[:4, :4]).inverse.sum()


class SpikingLinear(_Linear):
    """Takes time, batch, tokens and channels, and nothing less."""

    traits = Traits(domain="spiking", mixes_prefix=False)

    def forward(self, x: Tensor, grid: Grid | None = None, bias: Tensor | None = None) -> Tensor:
        if x.ndim != 4:
            raise UserError(f"want [T, B, N, C], got {tuple(x.shape)}")
        return super().forward(x)


_KINDS: dict[str, type[TokenMixer]] = {
    "square_only": SquareOnly,
    "fails": Fails,
    "needs_numbers": NeedsNumbers,
    "uncounted": Uncounted,
    "spiking_linear": SpikingLinear,
}


def registered(kind: str) -> str:
    """Have one of these mixers in the registry until the test ends; its name."""
    registry.register_mixer(kind)(_KINDS[kind])
    return kind
