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
    """What one mixer's attention took at one number of tokens, or why it was not measured.

    Attributes:
        mixer: Its label.
        side: Square root of the tokens N.
        tokens: N.
        mib: Peak of memory allocated beyond queries, keys and values, MiB.
        ratio: The peak as a multiple of the first mixer's.
        paper_mib: What Table 8 prints; None where it says nothing.
        paper_ratio: The table's multiple of QKTA.
        seconds: Time the pass took under measurement.
        reason: Why nothing was measured; None if it was.
    """

    mixer: str
    side: int
    tokens: int
    mib: float | None = None
    ratio: float | None = None
    paper_mib: float | None = None
    paper_ratio: float | None = None
    seconds: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """What a study found, so far or in all.

    Attributes:
        format: Version of the record.
        mixers: Labels of the mixers; others are given as multiples of the first.
        dim: Width C.
        num_heads: Heads.
        sides: Square roots of the numbers of tokens.
        order: Order of SSA's product where the mixer does not name one.
        device: Where it was measured.
        how: What was read.
        rows: The measurements.
        complete: Whether all sides asked for have been measured.
    """

    format: int = FORMAT
    mixers: tuple[str, ...]
    dim: int
    num_heads: int
    sides: tuple[int, ...]
    order: Literal["auto", "quadratic", "linear"]
    device: str
    how: str
    rows: tuple[GrowthRow, ...] = ()
    complete: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it."""
        return dict(to_json(self))


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(MemoryGrowth, StudyRecord):
    """The content of ``memory.json``."""
