# SPDX-License-Identifier: Apache-2.0
"""What stands where a host's token mixer stood, in blocks that know the grid of their tokens."""

from __future__ import annotations

from torch import Tensor, nn

from keymix.hosts.base import Place
from keymix.mixers.base import Grid, TokenMixer


class GridMixer(nn.Module):
    """Hands tokens and their grid to a mixer, so that images of any size may come.

    Args:
        mixer: The mixer.
        place: Where it stands; kept for the next mixer put here.
    """

    def __init__(self, mixer: TokenMixer, place: Place) -> None:
        super().__init__()
        self.mixer = mixer
        self.place = place

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Mix tokens ``[B, N, C]`` that lie on ``grid``."""
        out: Tensor = self.mixer(x, grid=grid)
        return out
