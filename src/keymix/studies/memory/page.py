# SPDX-License-Identifier: Apache-2.0
"""A study of memory against tokens: its table, and the study as one offline HTML page; no torch."""

from __future__ import annotations

from functools import partial

from keymix.analysis.complexity_record import BASELINE
from keymix.analysis.memory_record import MemoryGrowth, MemoryRecord
from keymix.report import charts, formats
from keymix.report.charts import Chart, Line, Look
from keymix.report.page import render_page
from keymix.report.tables import Column, Table
from keymix.studies.study import listed


def table(record: MemoryGrowth) -> Table:
    """Make the table that people read: a row for each number of tokens, a column for each mixer."""
    mixers = record.mixers
    found = {(row.side, row.mixer): row for row in record.rows}
    printed = [m for m in mixers if any(r.paper_mib for r in record.rows if r.mixer == m)]
    others = mixers[1:]
    columns = [Column("√N", "side", "whole"), Column("N", "tokens", "whole")]
    columns += [Column(f"{m}, MiB", f"{m}_mib", "mib") for m in mixers]
    columns += [Column(f"{m}, paper", f"{m}_paper_mib", "mib") for m in printed]
    columns += [Column(f"{m}, × {mixers[0]}", f"{m}_ratio", "ratio") for m in others]
    ratios = [m for m in printed if m != mixers[0]] if mixers[0] in printed else []
    columns += [Column(f"{m}, × in the paper", f"{m}_paper_ratio", "ratio") for m in ratios]
    rows = []
    for side in dict.fromkeys(row.side for row in record.rows):
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
    title = f"Peak memory of attention alone, C = {record.dim}, {_heads(record)}, float32"
    return Table("memory", title, columns, rows)


def rows(record: MemoryGrowth) -> Table:
    """Make the table of files and pipes: a row for each measurement, all that is known of it."""
    keys = ("mixer", "side", "tokens", "mib", "ratio", "paper_mib", "paper_ratio")
    columns = [Column("", key) for key in (*keys, "seconds", "reason")]
    cells = [[getattr(row, column.key) for column in columns] for row in record.rows]
    return Table("", "", columns, cells)


SOME = 1.2
"""Times from which a ratio is given in the answer."""

SAME = 0.05
"""Relative difference up to which two peaks count as the same."""


def answer(record: MemoryGrowth) -> str:
    """Compare the mixers at the most tokens where two or more of them were measured."""
    if not any(row.mib for row in record.rows):
        return f"The memory of {listed(record.mixers)} could not be measured"
    sides: dict[int, list[tuple[float, str]]] = {}
    for row in record.rows:
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
        return f"The attention of {listed([name for _, name in found])} takes the same memory {at}"
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


def _mib(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 1024 else f"{formats.mib(value)} MiB"


def render(record: MemoryRecord) -> str:
    """Render the page."""
    looks, chart = _chart(record)
    lost: dict[str, list[int]] = {}
    for row in record.rows:
        if row.reason:
            lost.setdefault(row.mixer, []).append(row.tokens)
    view = {
        "r": record,
        "answer": answer(record),
        "heads": _heads(record),
        "table": table(record),
        "charts": chart,
        "legend": looks,
        "looks": looks,
        "missing": lost,
        "printed": any(row.paper_mib for row in record.rows),
    }
    return render_page("own/page.html.j2", view, package=__package__ or "")


def _heads(record: MemoryGrowth) -> str:
    count = record.num_heads
    return "1 head" if count == 1 else f"{count} heads"


def _chart(record: MemoryGrowth) -> tuple[dict[str, Look], list[Chart]]:
    """Draw ours as curves and the paper's next to them; nothing if nothing was measured."""
    series: dict[str, list[tuple[int, float]]] = {}
    for key, suffix in (("mib", ""), ("paper_mib", ", paper")):
        for row in record.rows:
            if value := getattr(row, key):
                series.setdefault(f"{row.mixer}{suffix}", []).append((row.side, value))
    papers = [label for label in series if label.endswith(", paper")]
    looks = charts.looks(list(series), baseline=BASELINE, controls=papers)
    lines = [Line(label, looks[label], *zip(*at, strict=True)) for label, at in series.items()]
    draw = partial(
        charts.curves,
        lines=lines,
        x_label="√N, square root of the tokens",
        y_label="peak memory, MiB",
        log=True,
    )
    caption = (
        "Peak memory of the attention alone, one image and one time step; both axes logarithmic."
    )
    if papers:
        caption += " Grey: what QKFormer’s Table 8 prints."
    return looks, [Chart("memory", caption, draw)] if lines else []
