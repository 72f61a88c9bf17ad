# SPDX-License-Identifier: Apache-2.0
"""What values a layer is given: spikes of 0 and 1, sums of spikes, or any numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keymix.analysis.spikes_record import Kind

LARGEST = 8
"""Histograms count values up to here one by one; the last cell holds all from here on."""

_ORDER: tuple[Kind, ...] = ("binary", "counts", "real")


def kind_of(x: Tensor) -> Kind:
    """Say what kind of values a tensor has."""
    if x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all()):
        return "binary"
    return "counts" if bool(((x >= 0) & (x == x.round())).all()) else "real"


class Values:
    """Tells the values of tensors, one after another.

    Attributes:
        kind: The least plain kind that was seen.
        elements: Values seen.
        nonzero: Those that are not 0.
        total: Their sum: of spikes, how many there are.
        histogram: How many were 0, 1, 2, …; of kind ``"real"`` nobody asks.
    """

    def __init__(self) -> None:
        self.kind: Kind = "binary"
        self.elements = self.nonzero = 0
        self.total = 0.0
        self.histogram = torch.zeros(LARGEST + 1, dtype=torch.int64)

    def add(self, x: Tensor) -> tuple[float, float]:
        """Count the values of a tensor; return how many are not 0, and their sum."""
        kind = kind_of(x)
        self.kind = max(self.kind, kind, key=_ORDER.index)
        nonzero, total = int(torch.count_nonzero(x)), float(x.sum(dtype=torch.float64))
        self.elements += x.numel()
        self.nonzero += nonzero
        self.total += total
        if kind == "binary":
            self.histogram[0] += x.numel() - nonzero
            self.histogram[1] += nonzero
        elif kind == "counts":
            cells = x.flatten().clamp(max=LARGEST).long()
            self.histogram += torch.bincount(cells, minlength=LARGEST + 1).cpu()
        return float(nonzero), total

    @property
    def rate(self) -> float:
        """Mean value: of spikes, how many an element carries."""
        return self.total / self.elements

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: kind, mean, share that is not 0, shares of each value from 0 on."""
        shares = None
        if self.kind != "real":
            cells: list[int] = self.histogram.tolist()
            last = max(i for i, cell in enumerate(cells) if cell or i == 1)
            shares = [cell / self.elements for cell in cells[: last + 1]]
        return {
            "kind": self.kind,
            "mean": self.rate,
            "nonzero": self.nonzero / self.elements,
            "shares": shares,
        }
