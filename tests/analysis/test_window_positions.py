# SPDX-License-Identifier: Apache-2.0
"""Where shifted windows that are no squares lie, place by place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keymix.analysis.attention import window_positions
from keymix.hosts.attention_inputs import Layout


@pytest.mark.parametrize("pads_first", [False, True])
def test_a_shift_moves_windows_by_its_rows_and_columns(pads_first: bool) -> None:
    (height, width), (h, w), (up, left) = grid, window, shift = (10, 8), (4, 3), (2, 1)
    sizes: dict[str, Any] = {"grid": grid, "key_grid": grid, "window": window, "shift": shift}
    places = window_positions(Layout(**sizes, windows=(3, 3), pads_first=pads_first))
    rows, columns = (12, 9) if pads_first else grid  # of what is rolled
    for i, j, a, b in torch.cartesian_prod(*map(torch.arange, (3, 3, h, w))).tolist():
        y, x = i * h + a, j * w + b  # after the roll
        rolled = y < rows and x < columns
        y, x = (y + up) % rows, (x + left) % columns  # before it
        wanted = y * width + x if rolled and y < height and x < width else -1
        assert places[i * 3 + j, a * w + b] == wanted, (i, j, a, b)
