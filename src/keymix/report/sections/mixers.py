# SPDX-License-Identifier: Apache-2.0
"""Every mixer against the baseline: score, difference, certainty and cost in one table.

The table stands first on the page, and is what the terminal and Python print.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from keymix.analysis.statistics import Interval, Summary
from keymix.report import charts
from keymix.report.answer import answer, relative
from keymix.report.charts import Look
from keymix.report.formats import MISSING, changed, interval, no_spread, scored, with_unit
from keymix.report.part import Section, Shown, page_of
from keymix.report.record import OutcomeRow, Results
from keymix.report.tables import Cell, Column, Kind, Style, Table
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


@dataclass(frozen=True, kw_only=True)
class ScoreColumn:
    """A column of the table of scores: the key of a row's summary, and if its spread is shown."""

    key: str
    head: str
    score: Score
    spread: bool = True

    @property
    def column(self) -> Column:
        """How it is shown."""
        more = self.score.better == "more"
        style: Style = "" if self.spread else "soft"
        return Column(self.head, self.key, "ratio", most_first=more, style=style)

    def cell(self, found: Summary) -> Cell:
        """Write the mean over seeds, with its standard deviation if that is shown."""
        if found.mean is None:
            return Cell(None, "no run finished" if self.spread else MISSING, "soft")
        sd = "" if found.sd is None or not self.spread else f" ± {scored(found.sd, self.score)}"
        return Cell(found.mean, f"{scored(found.mean, self.score)}{sd}")


def columns(record: Results) -> list[ScoreColumn]:
    """List the columns of the table of scores, the task's own first, without those no run has."""
    task = record.task_kind
    first, *more = task.scores
    known = [ScoreColumn(key=first.key, head=with_unit(f"test {first.label}", first), score=first)]
    for score in (*more, *page_of(task).test_scores):
        found = (row.scores.get(score.key) for row in record.outcome.last)
        if any(summary is not None and summary.mean is not None for summary in found):
            head = with_unit(score.label, score)
            known.append(ScoreColumn(key=score.key, head=head, score=score))
    head = with_unit("validation", first)
    return [*known, ScoreColumn(key=f"val_{first.key}", head=head, score=first, spread=False)]


def dense_over(record: Results) -> tuple[str, dict[str, str]]:
    """Say over how many steps multiply-adds are counted, for the head of their column.

    "dense, T=4", empty where the model has no spikes; and by label what to say in the cells of
    those with another T, such as the ANN counterpart.
    """
    steps = record.time_steps
    if not record.spikes:
        return "", {}
    most = steps.get(record.baseline) or next(iter(steps.values()), None)
    others = {label: f"T={number}" for label, number in steps.items() if number != most}
    return ("dense, all T" if most is None else f"dense, T={most}"), others


def sections(shown: Shown) -> Iterator[Section]:
    """Show the table, and folded what is behind it."""
    r = shown.record
    table = decision(r)
    compared, score = differences(r, shown.looks), r.task_kind.score
    unsaid = answer(r).means_nothing
    view = {
        "table": _with_strips(table, charts.strips(compared, score=score)),
        "copied": {"csv": table.csv(), "markdown": table.markdown(), "latex": table.latex()},
        "axis": charts.axis_of(compared, score),
        "others": [] if unsaid else [row for row in r.outcome.last if row.degree],
        "scores": scores(r, r.outcome.last, "after the last epoch"),
        "best": scores(r, r.outcome.best, "at the epoch that was best on validation"),
    }
    yield Section(name="Mixers", template="sections/mixers.html.j2", view=view)


def decision(record: Results, *, further: bool = False) -> Table:
    """Make the table of every mixer against the baseline, the best score first.

    With `further` it has those of the task's other scores that are shown at a terminal.
    """
    score, beside = record.task_kind.score, page_of(record.task_kind).terminal if further else ()
    head = with_unit(score.label, score)
    shown = [ScoreColumn(key=score.key, head=head, score=score)]
    shown += [replace(each, spread=False) for each in columns(record) if each.key in beside]
    dense = dense_over(record)[0]
    costs = {
        Column(
            f"{name}, {dense}" if dense and key == "macs" else name,
            key,
            "ratio",
            gives_way=gives_way,
        ): [_cost(record, row.mixer, key, kind, unit) for row in record.outcome.last]
        for key, name, kind, unit, gives_way in COSTS
        if any(relative(record, label, key) for label in record.labels)
    }
    title = f"{say('title', record)}: test split, last epoch"
    table = _table(record, record.outcome.last, shown, costs, "decision", title)
    aside = [replace(c, gives_way=FURTHER) if c.key in beside else c for c in table.columns]
    rows = sorted(
        table.rows,
        key=lambda row: math.inf if row[1].value is None else -score.rank(row[1].value),
    )
    pick = record.recommendation.pick
    marked = frozenset(i for i, row in enumerate(rows) if row[0] == pick)
    return replace(table, columns=aside, rows=rows, marked=marked)


def scores(
    record: Results, rows: Sequence[OutcomeRow], when: str
) -> tuple[Table, list[tuple[str, str]]]:
    """Make the table of all scores of an epoch, and say why several seeds have no interval."""
    planned = len(record.seeds)
    finished = [len(record.finished(row.mixer)) for row in rows]
    runs = [Cell(n, str(n) if n == planned else f"{n} of {planned}") for n in finished]
    heading = Column("runs", "runs", "ratio", most_first=True, style="soft")
    title = f"Scores {when}"
    table = _table(record, rows, columns(record), {heading: runs}, "scores", title)
    notes = [(row.mixer, no_spread(row.seeds)) for row in rows if row.seeds]
    return table, [(mixer, why) for mixer, why in notes if why]


def _table(
    record: Results,
    rows: Sequence[OutcomeRow],
    shown: Sequence[ScoreColumn],
    more: Mapping[Column, Sequence[Cell]],
    key: str,
    title: str,
) -> Table:
    """Make a table: scores, the difference from the baseline, and more; then the references."""
    score = record.task_kind.score
    changed = with_unit("difference", replace(score, unit=score.difference_unit))
    level = f"{100 * (1 - record.alpha):.4g}\u00a0% interval"
    heads = [
        Column("mixer", "mixer", "name"),
        *(each.column for each in shown),
        Column(changed, "difference", "ratio", most_first=score.better == "more"),
        Column(level, "interval", "ratio", sort="none", label="interval"),
        Column("certainty", "certainty"),
        *more,
    ]
    cells: list[list[Any]] = [
        [
            row.mixer,
            *(each.cell(row.scores[each.key]) for each in shown),
            *_compared(record, row),
            *(values[i] for values in more.values()),
        ]
        for i, row in enumerate(rows)
    ]
    reference = [NOTHING, NOTHING, Cell("reference", "reference", "soft"), *[NOTHING] * len(more)]
    for known in record.references:
        of = {**known.scores, f"val_{score.key}": known.validation}
        values = ((of.get(each.key), each.score) for each in shown)
        made = (Cell(value, scored(value, its)) for value, its in values)
        cells.append([known.name, *made, *reference])
    return Table(key, title, heads, cells)


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
