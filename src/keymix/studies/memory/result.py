# SPDX-License-Identifier: Apache-2.0
"""What the attention of mixers took of memory, by the number of tokens. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from keymix.report import charts, formats
from keymix.report.charts import Chart, Line, Look
from keymix.report.result import Result
from keymix.report.tables import Column, Table
from keymix.studies.study import machine_of


@dataclass(frozen=True, kw_only=True)
class GrowthRow:
    """What one mixer's attention took at one number of tokens, or why it was not measured."""

    mixer: str
    side: int  # square root of the tokens N
    tokens: int  # n
    mib: float | None = None  # peak of memory allocated beyond queries, keys and values, MiB
    ratio: float | None = None  # the peak as a multiple of the first mixer's
    seconds: float | None = None  # time the pass took under measurement
    reason: str | None = None  # why nothing was measured; None if it was

    @property
    def amount(self) -> str:
        """The peak with its unit."""
        mib = self.mib or 0.0
        return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{formats.mib(mib)} MiB"


@dataclass(kw_only=True, repr=False)
class MemoryGrowth(Result):
    """What a study found, so far or in all.

    Tables are ``"mixers"``, a row for each number of tokens, and ``"rows"``, one for each
    measurement; the figure is ``"peak"``.
    """

    name = "memory"
    templates = "keymix.studies.memory"

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

    @property
    def data(self) -> MemoryGrowth:
        """The record itself."""
        return self

    @property
    def compared(self) -> Sequence[GrowthRow]:
        """What was measured at the most tokens where two mixers were, or one; the least first."""
        measured = [row for row in self.rows if row.mib]
        sides = [row.side for row in measured]
        least = min(2, max(map(sides.count, sides), default=0))
        most = max((side for side in sides if sides.count(side) >= least), default=0)
        found = [row for row in measured if row.side == most]
        return sorted(found, key=lambda row: (row.mib or 0.0, row.mixer))

    @property
    def lost(self) -> dict[str, list[int]]:
        """Mixers that could not be measured everywhere, and at which numbers of tokens."""
        found: dict[str, list[int]] = {}
        for row in self.rows:
            if row.reason:
                found.setdefault(row.mixer, []).append(row.tokens)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be measured."""
        return tuple(
            f"{row.mixer} at sqrt(N) = {row.side}: {row.reason}" for row in self.rows if row.reason
        )

    @property
    def heads(self) -> str:
        """How many heads, in words."""
        return "1 head" if self.num_heads == 1 else f"{self.num_heads} heads"

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each number of tokens; and a row for each measurement."""
        first, *others = self.mixers
        found = {(row.side, row.mixer): row for row in self.rows}
        columns = [Column("√N", "side", "whole"), Column("N", "tokens", "whole")]
        columns += [Column(f"{m}, MiB", f"{m}_mib", "mib") for m in self.mixers]
        columns += [Column(f"{m}, × {first}", f"{m}_ratio", "ratio") for m in others]
        rows = []
        for side in dict.fromkeys(row.side for row in self.rows):
            mib = [found[side, m].mib for m in self.mixers]
            rows.append([side, side * side, *mib, *(found[side, m].ratio for m in others)])
        title = f"Peak memory of attention alone, C = {self.dim}, {self.heads}, float32"
        keys = ("mixer", "side", "tokens", "mib", "ratio", "seconds", "reason")
        cells = [[getattr(row, key) for key in keys] for row in self.rows]
        return {
            "mixers": Table("mixers", title, columns, rows, saved=False),
            "rows": Table("rows", "", [Column("", key) for key in keys], cells, shown=False),
        }

    @property
    def looks(self) -> dict[str, Look]:
        """The mixers that were measured."""
        measured = dict.fromkeys(row.mixer for row in self.rows if row.mib)
        return charts.looks([*measured], baseline="softmax")

    @property
    def figures(self) -> dict[str, Chart]:
        """A curve for each mixer; nothing if nothing was measured."""
        lines = []
        for label, look in self.looks.items():
            at = [(row.side, row.mib) for row in self.rows if row.mixer == label and row.mib]
            lines.append(Line(label, look, *zip(*at, strict=True)))
        x_label, y_label = "√N, square root of the tokens", "peak memory, MiB"
        draw = partial(charts.curves, lines=lines, x_label=x_label, y_label=y_label, log=True)
        caption = (
            "Peak memory of the attention alone, one image and one time step; both axes "
            "logarithmic."
        )
        return {"peak": Chart("peak", caption, draw)} if lines else {}

    def machine(self, lines: Mapping[str, str]) -> Mapping[str, str]:
        """Leave a GPU out that was idle."""
        return machine_of(lines, self.device)
