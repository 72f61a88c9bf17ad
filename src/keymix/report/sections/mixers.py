# SPDX-License-Identifier: Apache-2.0
"""Every mixer against the baseline: score, difference, certainty and cost in one table.

The table stands first on the page, and is what the terminal and Python print.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from keymix.analysis.statistics import Interval, Summary
from keymix.report import charts
from keymix.report.answer import answer, relative
from keymix.report.charts import Look
from keymix.report.formats import MISSING, changed, interval, no_spread, scored
from keymix.report.part import Section, Shown, page_of
from keymix.report.record import OutcomeRow, ReferenceRow, Results
from keymix.report.tables import Cell, Column, Kind, Table
from keymix.report.wording import ScoreColumn, columns, dense_over, with_unit, wording
from keymix.report.words import say
from keymix.task import Score

PLACE = 10
NOTHING = Cell(None, MISSING, "soft")
COSTS: tuple[tuple[str, str, Kind, str, int], ...] = (
    ("params", "params", "count", "", 2),
    ("macs", "multiply-adds", "count", "", 3),
    ("step_ms", "step", "ms", " ms", 1),
    ("latency_ms", "latency", "ms", " ms", 4),
    ("peak_mib", "memory", "mib", " MiB", 5),
)
"""Costs of the table: key, heading, kind, unit, and which give way first at a narrow terminal."""
FURTHER = 6
"""Scores next to the first give way at a narrow terminal before costs."""


def sections(shown: Shown) -> Iterator[Section]:
    """Show the table, and folded what is behind it."""
    r = shown.record
    table = decision(r)
    compared, score = differences(r, shown.looks), r.task_kind.score
    unsaid = answer(r).means_nothing
    view = {
        "table": _with_strips(table, charts.strips(compared, score=score, units=wording(r).units)),
        "copied": {"csv": table.csv(), "markdown": table.markdown(), "latex": table.latex()},
        "axis": charts.axis_of(compared, score),
        "others": [] if unsaid else [row for row in r.outcome.last if row.degree],
        "ahead": _ahead(r),
        "scores": scores(r, r.outcome.last, "after the last epoch"),
        "best": scores(r, r.outcome.best, "at the epoch that was best on validation"),
    }
    yield Section(name="Mixers", template="sections/mixers.html.j2", view=view)


def decision(record: Results, *, further: bool = False) -> Table:
    """Make the table of every mixer against the baseline, the best score first.

    With `further` it has those of the task's other scores that are shown at a terminal.
    """
    score, words = record.task_kind.score, wording(record)
    beside = page_of(record.task_kind).terminal if further else ()
    more = [column for column in columns(record) if column.key in beside]
    known = [each for each in COSTS if any(relative(record, m, each[0]) for m in record.labels)]
    dense = dense_over(record)[0]
    heads = [
        Column("mixer", "mixer", "name"),
        _scores_column(with_unit(score.label, score), score.key, score),
        *(replace(_scores_column(c.head, c.key, c.score), gives_way=FURTHER) for c in more),
        _scores_column(words.changed, "difference", score),
        Column(_level(record), "interval", "ratio", sort="none", label="interval"),
        Column("certainty", "certainty"),
        *(
            Column(
                f"{name}, {dense}" if dense and key == "macs" else name,
                key,
                "ratio",
                gives_way=gives_way,
            )
            for key, name, _, _, gives_way in known
        ),
    ]
    rows: list[tuple[float | None, list[Any]]] = [
        (
            row.scores[score.key].mean,
            [
                row.mixer,
                _spread(row.scores[score.key], score),
                *(Cell(mean, scored(mean, c.score)) for c in more for mean in [_mean(row, c)]),
                *_compared(record, row),
                *(_cost(record, row.mixer, key, kind, unit) for key, _, kind, unit, _ in known),
            ],
        )
        for row in record.outcome.last
    ]
    for reference in record.references:
        cells = _of_reference(reference, [score, *(c.score for c in more)], len(known))
        rows.append((reference.scores.get(score.key), cells))
    rows.sort(key=lambda each: math.inf if each[0] is None else -score.rank(each[0]))
    pick = record.recommendation.pick
    marked = frozenset(i for i, (_, cells) in enumerate(rows) if cells[0] == pick)
    title = f"{say('title', record)}: test split, last epoch"
    return Table("decision", title, heads, [cells for _, cells in rows], marked=marked)


def _scores_column(head: str, key: str, score: Score) -> Column:
    return Column(head, key, "ratio", most_first=score.better == "more")


def _mean(row: OutcomeRow, column: ScoreColumn) -> float | None:
    return row.scores[column.key].mean


def _level(record: Results) -> str:
    return f"{100 * (1 - record.alpha):.4g}\u00a0% interval"


def _spread(summary: Summary, score: Score) -> Cell:
    """Write a mean with its standard deviation over seeds."""
    if summary.mean is None:
        return Cell(None, "no run finished", "soft")
    spread = "" if summary.sd is None else f" ± {scored(summary.sd, score)}"
    return Cell(summary.mean, f"{scored(summary.mean, score)}{spread}")


def _compared(record: Results, row: OutcomeRow) -> list[Cell]:
    """Write the difference from the baseline, its interval, and how certain it is."""
    score = record.task_kind.score
    if row.mixer == record.baseline:
        return [Cell(0, "baseline", "soft"), NOTHING, NOTHING]
    if row.seeds is None:
        return [Cell(None, "no pair of runs", "soft"), NOTHING, NOTHING]
    degree = row.degree or "reference"
    return [
        Cell(row.seeds.difference, changed(row.seeds.difference, score)),
        Cell(None, interval(row.interval, score)),
        Cell(degree, degree),
    ]


def _of_reference(row: ReferenceRow, shown: Sequence[Score], rest: int) -> list[Any]:
    """Write a point of reference that no network was trained for: its scores alone."""
    values = [(row.scores.get(score.key), score) for score in shown]
    made = [Cell(value, scored(value, score)) for value, score in values]
    reference = Cell("reference", "reference", "soft")
    return [row.name, *made, NOTHING, NOTHING, reference, *[NOTHING] * rest]


def _cost(record: Results, mixer: str, key: str, kind: Kind, unit: str) -> Cell:
    """Write a cost against the baseline's, and the baseline's own."""
    cost = record.costs.get(mixer)
    value = None if cost is None else getattr(cost, key)
    if mixer == record.baseline and value is not None:
        return Cell(value, Column("", "", kind).cell(value) + unit, "soft")
    text = relative(record, mixer, key)
    return Cell(value, text) if text else NOTHING


# ---- what only the page has -----------------------------------------------------------------


def _with_strips(table: Table, drawn: Mapping[str, Markup]) -> Table:
    """Put a column of strips behind the score."""
    strip = Column("from the baseline", "strip", where="people", sort="none", label="intervals")
    rows = [[*row[:2], Cell(None, drawn.get(row[0], ""), "strip"), *row[2:]] for row in table.rows]
    return replace(table, columns=[*table.columns[:2], strip, *table.columns[2:]], rows=rows)


def differences(record: Results, looks: Mapping[str, Look]) -> list[charts.Row]:
    """List what is drawn: every difference, both intervals, the difference of each seed."""
    return [
        charts.Row(
            label=row.mixer,
            look=looks[row.mixer],
            difference=row.seeds.difference,
            both=_ends(row.interval),
            images=_ends(row.images),
            by_seed=_by_seed(record, row.mixer),
        )
        for row in record.outcome.last
        if row.seeds is not None and row.mixer != record.baseline
    ]


def _ends(found: Interval | None) -> tuple[float, float] | None:
    if found is None or found.low is None or found.high is None:
        return None
    return (found.low, found.high)


def _by_seed(record: Results, mixer: str) -> list[float]:
    """Return the difference from the baseline of each seed that both have finished."""
    key = record.task_kind.score.key
    ours, theirs = (
        {run.seed: run.last.test.get(key) for run in record.finished(label)}
        for label in (mixer, record.baseline)
    )
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    return [float(a - b) for a, b in pairs if a is not None and b is not None]


def _ahead(record: Results) -> str:
    """Say that the best row of the table is no mixer; empty where that is said already."""
    if not record.learned or "reference_ahead" in record.found:
        return ""
    score, base = record.task_kind.score, record.baseline
    known = {row.mixer: row.scores[score.key].mean for row in record.outcome.last}
    known |= {row.name: row.scores.get(score.key) for row in record.references if row.learned}
    means = {label: mean for label, mean in known.items() if mean is not None}
    best = max(means, key=lambda label: score.rank(means[label]), default=base)
    mixers = [score.rank(means[label]) for label in record.named if label in means]
    if best in record.named or base not in means or not mixers:
        return ""
    if score.rank(means[best]) <= max(mixers):
        return ""
    return say("ahead", record, best, means[best] - means[base], relative(record, best, "macs"))


def scores(
    record: Results, rows: Sequence[OutcomeRow], when: str
) -> tuple[Table, list[tuple[str, str]]]:
    """Make the table of all scores of an epoch, and say why several seeds have no interval."""
    shown = columns(record)
    heads = (
        Column("mixer", "mixer", "name"),
        *(
            replace(_scores_column(c.head, c.key, c.score), style="" if c.spread else "soft")
            for c in shown
        ),
        _scores_column(wording(record).changed, "difference", record.task_kind.score),
        Column(_level(record), "interval", "ratio", sort="none", label="interval"),
        Column("certainty", "certainty"),
        Column("runs", "runs", "ratio", most_first=True, style="soft"),
    )
    cells = [[row.mixer, *_all_scores(row, shown), *_compared(record, row)] for row in rows]
    for made, row in zip(cells, rows, strict=True):
        done, planned = len(record.finished(row.mixer)), len(record.seeds)
        made.append(Cell(done, str(done) if done == planned else f"{done} of {planned}"))
    cells += [_of_reference(each, [c.score for c in shown], 1) for each in record.references]
    notes = [(row.mixer, no_spread(row.seeds)) for row in rows if row.seeds]
    table = Table("scores", f"{wording(record).heading} {when}", heads, cells)
    return table, [(mixer, why) for mixer, why in notes if why]


def _all_scores(row: OutcomeRow, shown: Sequence[ScoreColumn]) -> list[Any]:
    return [
        _spread(row.scores[c.key], c.score)
        if c.spread or _mean(row, c) is None
        else Cell(_mean(row, c), scored(_mean(row, c), c.score))
        for c in shown
    ]
