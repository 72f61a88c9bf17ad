# SPDX-License-Identifier: Apache-2.0
"""What a study of memory against tokens leaves: its rows and its record. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from keymix.analysis.study_record import StudyRecord
from keymix.records import to_json

FORMAT = 1
"""Version of the record (``MemoryGrowth.to_dict()["format"]``)."""


@dataclass(frozen=True, kw_only=True)
class GrowthRow:
    """What one mixer's attention took at one number of tokens, or why it was not measured."""

    mixer: str
    side: int  # square root of the tokens N
    tokens: int  # n
    mib: float | None = None  # peak of memory allocated beyond queries, keys and values, MiB
    ratio: float | None = None  # the peak as a multiple of the first mixer's
    paper_mib: float | None = None  # what Table 8 prints; None where it says nothing
    paper_ratio: float | None = None  # the table's multiple of QKTA
    seconds: float | None = None  # time the pass took under measurement
    reason: str | None = None  # why nothing was measured; None if it was


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """What a study found, so far or in all."""

    format: int = FORMAT
    mixers: tuple[str, ...]  # labels of the mixers; others are given as multiples of the first
    dim: int  # width C
    num_heads: int  # heads
    sides: tuple[int, ...]  # square roots of the numbers of tokens
    # order of SSA's product where the mixer does not name one
    order: Literal["auto", "quadratic", "linear"]
    device: str  # where it was measured
    how: str  # what was read
    rows: tuple[GrowthRow, ...] = ()  # the measurements
    complete: bool = False  # whether all sides asked for have been measured

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it."""
        return dict(to_json(self))


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(MemoryGrowth, StudyRecord):
    """The content of ``memory.json``."""
