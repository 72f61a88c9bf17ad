# SPDX-License-Identifier: Apache-2.0
"""What the scores say: verdicts, differences with their intervals, the table of scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from keymix.analysis.statistics import Interval, Summary
from keymix.report import charts
from keymix.report.charts import Look, Row
from keymix.report.formats import MISSING, changed, no_spread, scored, span
from keymix.report.part import Section, Shown
from keymix.report.record import ComparisonRecord, OutcomeRow, ReferenceRow
from keymix.report.tables import Cell, Column, Table
from keymix.report.wording import ScoreColumn, columns, recommended, wording

PLACE = 10


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores at one epoch, and why several seeds have no interval, by mixer's label."""

    table: Table
    notes: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The mixers but the baseline, their differences drawn, and the scores of both epochs.

    `lead` is the result without what stands above it.
    """

    others: list[OutcomeRow]
    lead: str
    recommended: str
    references: list[tuple[str, str]]  # names of points of reference, and how they answer
    forest: Markup | None
    scores: Scores
    best: Scores
    about_table: str


def sections(shown: Shown) -> Iterator[Section]:
    """Show verdicts and scores."""
    record = shown.record
    view = Verdicts(
        others=[row for row in record.outcome.last if row.headline],
        lead=record.lead.removeprefix(record.diagnoses[0].text if record.diagnoses else "").strip(),
        recommended=recommended(record),
        references=[(row.name, _about(row, record)) for row in record.references],
        forest=forest(record, shown.looks),
        scores=scores(record, record.outcome.last, "after the last epoch"),
        best=scores(record, record.outcome.best, "at the epoch that was best on validation"),
        about_table=shown.page.about_table(record),
    )
    yield Section(template="sections/verdicts.html.j2", view=view)


def scores(record: ComparisonRecord, rows: Sequence[OutcomeRow], when: str) -> Scores:
    """Make the table of scores of an epoch, one row per mixer."""
    words, shown = wording(record), columns(record)
    most_first = record.task_kind.score.better == "more"
    level = f"{100 * (1 - record.alpha):.4g}\u00a0% interval"
    heads = (
        Column("mixer", "mixer", "name"),
        *(
            Column(
                column.head,
                column.key,
                "ratio",
                most_first=column.score.better == "more",
                style="" if column.spread else "soft",
            )
            for column in shown
        ),
        Column(words.changed, "difference", "ratio", most_first=most_first),
        Column(level, "interval", "ratio", sort="none", label="interval"),
        Column("certainty", "certainty"),
        Column("runs", "runs", "ratio", most_first=True, style="soft"),
    )
    cells = [[row.mixer, *_cells(record, row, shown), _runs(record, row)] for row in rows]
    cells += [_reference(each, shown) for each in record.references]
    title = f"{words.heading} {when}"
    notes = [(row.mixer, no_spread(row.seeds)) for row in rows if row.seeds]
    return Scores(
        table=Table("scores", title, heads, cells), notes=[(m, why) for m, why in notes if why]
    )


NOTHING = Cell(None, MISSING, "soft")


def _cells(record: ComparisonRecord, row: OutcomeRow, shown: Sequence[ScoreColumn]) -> list[Cell]:
    """Write the scores of a mixer, its difference from the baseline, and both intervals."""
    score = record.task_kind.score
    if not record.finished(row.mixer):
        return [Cell(None, "no run finished", "soft"), *[NOTHING] * (len(shown) + 2)]
    made = [_spread(row.scores[column.key], column) for column in shown]
    if row.mixer == record.baseline:
        return [*made, Cell(0, "baseline", "soft"), *[NOTHING] * 2]
    if row.seeds is None:
        return [*made, Cell(None, "no pair of runs", "soft"), *[NOTHING] * 2]
    difference = row.seeds.difference
    found = row.interval
    both = Cell(None, MISSING if found is None else span(found.low, found.high, score))
    degree = Cell(row.degree or "", row.degree or "outside tests")
    return [*made, Cell(difference, changed(difference, score)), both, degree]


def _about(row: ReferenceRow, record: ComparisonRecord) -> str:
    """Say how a point of reference answers, and how certain its score is."""
    score = record.task_kind.score
    if row.low is None or row.high is None:
        return row.about
    ends = f"{scored(row.low, score)} to {score.text(row.high)}"
    return f"{row.about}; {score.name} {ends} (95\u00a0% over test {wording(record).units})"


def _reference(row: ReferenceRow, shown: Sequence[ScoreColumn]) -> list[Any]:
    """Write a point of reference that no network was trained for: its scores alone."""
    made = [
        Cell(value, scored(value, column.score))
        for column in shown
        for value in [row.scores.get(column.key)]
    ]
    return [row.name, *made, Cell(None, "reference", "soft"), *[NOTHING] * 3]


def _spread(summary: Summary, column: ScoreColumn) -> Cell:
    """Write a mean with its standard deviation over seeds."""
    text = scored(summary.mean, column.score)
    if column.spread:
        sd = "" if summary.sd is None else f"± {scored(summary.sd, column.score)}"
        more = Markup(' <span class="pm">{}</span>').format(sd) if sd else ""
        text = Markup("<span>{}{}</span>").format(text, more)
    return Cell(summary.mean, text)


def _runs(record: ComparisonRecord, row: OutcomeRow) -> Cell:
    """Say how many of a mixer's runs finished: ``3``, or ``2 of 3``."""
    planned, done = len(record.seeds), len(record.finished(row.mixer))
    text = str(done) if done == planned else f"{done} of {planned}"
    return Cell(row.scores[record.task_kind.score.key].n, text)


def forest(record: ComparisonRecord, looks: Mapping[str, Look]) -> Markup | None:
    """Draw every mixer's difference from the baseline with both intervals."""
    rows = [
        Row(
            label=row.mixer,
            look=looks[row.mixer],
            difference=row.seeds.difference,
            both=_ends(row.interval),
            images=_ends(row.images),
        )
        for row in record.outcome.last
        if row.degree is not None and row.seeds is not None
    ]
    if not rows:
        return None
    score, baseline = record.task_kind.score, record.baseline
    name = "; ".join(f"{r.label} {score.changed(r.difference)}" for r in rows)
    return charts.forest(
        rows,
        baseline=baseline,
        name=f"Difference from {baseline}: {name}",
        score=score,
        units=wording(record).units,
    )


def _ends(interval: Interval | None) -> tuple[float, float] | None:
    if interval is None or interval.low is None or interval.high is None:
        return None
    return (interval.low, interval.high)
