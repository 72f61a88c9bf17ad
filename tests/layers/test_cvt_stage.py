# SPDX-License-Identifier: Apache-2.0
"""A stage of CvT: where its dropout and its stochastic depth act."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from keymix.layers.cvt_stage import CvTBlock
from mixer_cases import stir
from tolerances import close


class Doubled(torch.nn.Module):
    """A mixer of a block."""

    def forward(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Return twice the tokens."""
        return 2 * x


def block(**options: float) -> CvTBlock:
    made = CvTBlock(8, **options, dtype=torch.float64).train()
    made.attn = Doubled()
    stir(made)
    return made


def test_a_block_without_its_branches_is_the_identity() -> None:
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    assert torch.equal(block(drop_path=1 - 1e-9)(x, (2, 3)), x)


def test_the_mlp_drops_its_hidden_and_its_last_values() -> None:
    made, x = block(proj_drop=0.4), torch.randn(3, 6, 8, dtype=torch.float64)
    torch.manual_seed(3)
    y = x + 2 * made.norm1(x)
    hidden = made.mlp.fc1(made.norm2(y))
    hidden = F.dropout(hidden * torch.sigmoid(1.702 * hidden), 0.4)
    wanted = y + F.dropout(made.mlp.fc2(hidden), 0.4)
    torch.manual_seed(3)
    close(made(x, (2, 3)), wanted)
