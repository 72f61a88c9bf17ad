# SPDX-License-Identifier: Apache-2.0
"""Patch merging: which tokens become one, and timm's where timm has the same."""

from __future__ import annotations

import pytest
import torch
from timm.models.swin_transformer import PatchMerging

from each import together
from keymix.errors import UserError
from keymix.layers.patches import PatchMerge
from mixer_cases import stir
from tolerances import close


@together
@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("sides", [(6, 6), (5, 7)])
def test_neighbours_become_one_token(factor: int, sides: tuple[int, int]) -> None:
    layer = PatchMerge(4, 6, factor).double()
    stir(layer)
    x = torch.randn(2, *sides, 4, dtype=torch.float64)
    y = layer(x)
    rows, columns = (-(-side // factor) for side in sides)
    assert y.shape == (2, rows, columns, 6)
    for row in range(rows):
        for column in range(columns):
            seen = torch.zeros(2, factor, factor, 4, dtype=torch.float64)
            part = x[:, row * factor :, column * factor :][:, :factor, :factor]
            seen[:, : part.shape[1], : part.shape[2]] = part
            close(y[:, row, column], layer.reduction(seen.transpose(1, 2).flatten(1)))


def test_halving_without_a_norm_sees_the_tokens_timm_sees() -> None:
    theirs = PatchMerging(4, 6, norm_layer=torch.nn.Identity).double()
    stir(theirs)
    mine = PatchMerge(4, 6).double()
    torch.nn.init.zeros_(mine.reduction.bias)
    mine.load_state_dict(theirs.state_dict(), strict=False)
    x = torch.randn(2, 5, 6, 4, dtype=torch.float64)
    close(mine(x), theirs(x))


def test_a_factor_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="factor=0"):
        PatchMerge(4, 6, 0)
