# SPDX-License-Identifier: Apache-2.0
"""Whether a network's outputs say anything of the images that they are of."""

from __future__ import annotations

import torch
from torch import Tensor


class Varies:
    """Compares outputs, batch after batch, with the first of them."""

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._seen, self._differ = 0, False

    def see(self, outputs: Tensor) -> None:
        """Take in a batch ``[B, ...]``."""
        first = outputs[:1] if self._first is None else self._first
        self._first, self._seen = first, self._seen + len(outputs)
        same = torch.allclose(
            outputs, first.expand_as(outputs), rtol=1e-6, atol=1e-12, equal_nan=True
        )
        self._differ = self._differ or not same

    def told(self) -> bool:
        """Say whether any differed from the first by more than rounding; true of a single one."""
        return self._differ or self._seen < 2
