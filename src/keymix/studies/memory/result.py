# SPDX-License-Identifier: Apache-2.0
"""What the attention of mixers took of memory, by the number of tokens. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from keymix.analysis.complexity_record import BASELINE
from keymix.report import charts, formats
from keymix.report.charts import Chart, Line, Look
from keymix.report.tables import Column, Table
from keymix.studies.study import Found, listed, machine_of

SOME = 1.2
"""Times from which a ratio is given in the answer."""

PAPER = ", paper"
"""What the labels of printed figures end in."""

SAME = 0.05
"""Relative difference up to which two peaks count as the same."""


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


@dataclass(kw_only=True, repr=False)
class MemoryGrowth(Found):
    """What a study found, so far or in all.

    Tables are ``"mixers"``, a row for each number of tokens, and ``"rows"``, one for each
    measurement; the figure is ``"peak"``.
    """

    name = "memory"

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
    def answer(self) -> str:
        """Compare the mixers at the most tokens where two or more of them were measured."""
        if not any(row.mib for row in self.rows):
            return f"The memory of {listed(self.mixers)} could not be measured"
        sides: dict[int, list[tuple[float, str]]] = {}
        for row in self.rows:
            if row.mib:
                sides.setdefault(row.side, []).append((row.mib, row.mixer))
        wanted = max(map(len, sides.values()))
        side = max(side for side, found in sides.items() if len(found) >= min(2, wanted))
        found = sorted(sides[side])
        (least, first), (most, last) = found[0], found[-1]
        at = f"at {side * side:,} tokens"
        if len(found) == 1:
            return f"The attention of {first} takes {_mib(least)} {at}"
        times = most / least
        if times < 1 + SAME:
            names = listed([name for _, name in found])
            return f"The attention of {names} takes the same memory {at}"
        often = f"{times:.{0 if times >= 10 else 1}f} times less" if times >= SOME else "less"
        if len(found) == 2:
            return (
                f"The attention of {first} takes {often} memory than that of {last} {at}: "
                f"{_mib(least)} against {_mib(most)}"
            )
        return (
            f"Of {len(found)} mixers {first} takes the least memory for its attention {at}, "
            f"{_mib(least)}, and {last} the most, {_mib(most)}"
        )

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each number of tokens; and a row for each measurement."""
        return {"mixers": self._wide(), "rows": self._long()}

    def _wide(self) -> Table:
        """Make a row for each number of tokens, and a column for each mixer."""
        mixers = self.mixers
        found = {(row.side, row.mixer): row for row in self.rows}
        printed = [m for m in mixers if any(r.paper_mib for r in self.rows if r.mixer == m)]
        others = mixers[1:]
        columns = [Column("√N", "side", "whole"), Column("N", "tokens", "whole")]
        columns += [Column(f"{m}, MiB", f"{m}_mib", "mib") for m in mixers]
        columns += [Column(f"{m}, paper", f"{m}_paper_mib", "mib") for m in printed]
        columns += [Column(f"{m}, × {mixers[0]}", f"{m}_ratio", "ratio") for m in others]
        ratios = [m for m in printed if m != mixers[0]] if mixers[0] in printed else []
        columns += [Column(f"{m}, × in the paper", f"{m}_paper_ratio", "ratio") for m in ratios]
        rows = []
        for side in dict.fromkeys(row.side for row in self.rows):
            here = {m: found[side, m] for m in mixers}
            rows.append(
                [
                    side,
                    side * side,
                    *(here[m].mib for m in mixers),
                    *(here[m].paper_mib for m in printed),
                    *(here[m].ratio for m in others),
                    *(here[m].paper_ratio for m in ratios),
                ]
            )
        title = f"Peak memory of attention alone, C = {self.dim}, {self.heads}, float32"
        return Table("mixers", title, columns, rows, saved=False)

    def _long(self) -> Table:
        """Make the table of files: a row for each measurement, all that is known of it."""
        keys = ("mixer", "side", "tokens", "mib", "ratio", "paper_mib", "paper_ratio")
        columns = [Column("", key) for key in (*keys, "seconds", "reason")]
        cells = [[getattr(row, column.key) for column in columns] for row in self.rows]
        return Table("rows", "", columns, cells, shown=False)

    def _series(self) -> dict[str, list[tuple[int, float]]]:
        """Return what was measured, and what the paper prints, along the sides."""
        series: dict[str, list[tuple[int, float]]] = {}
        for key, suffix in (("mib", ""), ("paper_mib", PAPER)):
            for row in self.rows:
                if value := getattr(row, key):
                    series.setdefault(f"{row.mixer}{suffix}", []).append((row.side, value))
        return series

    @property
    def looks(self) -> dict[str, Look]:
        """Draw the paper's in grey."""
        found = [*self._series()]
        papers = [label for label in found if label.endswith(PAPER)]
        return charts.looks(found, baseline=BASELINE, controls=papers)

    @property
    def figures(self) -> dict[str, Chart]:
        """Draw ours as curves and the paper's next to them; nothing if nothing was measured."""
        looks = self.looks
        lines = [
            Line(label, looks[label], *zip(*at, strict=True))
            for label, at in self._series().items()
        ]
        draw = partial(
            charts.curves,
            lines=lines,
            x_label="√N, square root of the tokens",
            y_label="peak memory, MiB",
            log=True,
        )
        caption = "Peak memory of the attention alone, one image and one time step; both axes "
        caption += "logarithmic."
        if any(label.endswith(PAPER) for label in looks):
            caption += " Grey: what QKFormer’s Table 8 prints."
        return {"peak": Chart("peak", caption, draw)} if lines else {}

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

    def machine(self, lines: Mapping[str, str]) -> Mapping[str, str]:
        """Leave a GPU out that was idle."""
        return machine_of(lines, self.device)

    def view(self) -> dict[str, object]:
        """Return what else its page shows."""
        lost: dict[str, list[int]] = {}
        for row in self.rows:
            if row.reason:
                lost.setdefault(row.mixer, []).append(row.tokens)
        return {
            "missing": lost,
            "printed": any(row.paper_mib for row in self.rows),
        }


def _mib(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 1024 else f"{formats.mib(value)} MiB"
