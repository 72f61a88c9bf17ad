# SPDX-License-Identifier: Apache-2.0
"""The leading axes of an attention call: those that share keys, and those that do not."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Axes:
    """Leading axes as two, ``[B, G]``: the axes that share keys, and the others with the heads.

    ``lead`` are the sizes of the axes before the heads, of which the last ``own``, such as
    windows, have keys of their own.
    """

    def __init__(self, lead: torch.Size, heads: int, own: int) -> None:
        self.lead, self.heads, self._at = lead, heads, len(lead) - own
        self.own = lead[self._at :]
        self.sizes = math.prod(lead[: self._at]), math.prod(self.own) * heads

    def split(self, t: Tensor) -> Tensor:
        """Bring ``[*, h, R, D]`` to ``[B, G, R, D]``."""
        return t.reshape(*self.sizes, *t.shape[-2:])

    def joined(self, t: Tensor) -> Tensor:
        """Bring ``[B, G, R, D]`` to ``[*, h, R, D]``."""
        return t.reshape(*self.lead, self.heads, *t.shape[-2:])

    def bias(self, bias: Tensor) -> Tensor:
        """Bring what broadcasts to ``[*, h, N, M]`` to ``[B or 1, G or 1, N or 1, M or 1]``."""
        full = (*self.lead, self.heads)
        bias = bias[(None,) * (len(full) + 2 - bias.ndim)]
        sizes = [*bias.shape[:-2]]
        for part in (slice(0, self._at), slice(self._at, len(full))):
            if sizes[part] != [1] * len(sizes[part]):
                sizes[part] = full[part]
        bias = bias.expand(*sizes, *bias.shape[-2:])
        pair = math.prod(sizes[: self._at]), math.prod(sizes[self._at :])
        return bias.reshape(*pair, *bias.shape[-2:])
