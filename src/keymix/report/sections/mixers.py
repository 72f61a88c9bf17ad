# SPDX-License-Identifier: Apache-2.0
"""Every mixer against the baseline: score, difference, certainty and cost in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from markupsafe import Markup

from keymix.analysis.statistics import Interval, Summary
from keymix.report import charts
from keymix.report.answer import answer, relative
from keymix.report.charts import Look
from keymix.report.formats import MISSING, changed, interval, no_spread, scored
from keymix.report.part import Section, Shown
from keymix.report.record import ComparisonRecord, OutcomeRow, ReferenceRow
from keymix.report.tables import Cell, Column, Kind, Table
from keymix.report.wording import (
    ScoreColumn,
    columns,
    control_name,
    dense_over,
    with_unit,
    wording,
)
from keymix.task import Score

PLACE = 10


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores at one epoch, and why several seeds have no interval, by mixer's label."""

    table: Table
    notes: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Mixers:
    """The table that decides, the sentences behind it, and all scores of both epochs.

    `lead` is the result without what stands above it; `copied` the table as text, by format.
    `roles` say what rows without a mixer are, and `ahead` which of them is the best.
    """

    table: Table
    copied: Mapping[str, str]
    axis: str  # what the strips show, and from where to where
    others: list[OutcomeRow]
    lead: str
    roles: str
    ahead: str
    left_out: bool  # whether sections are left out, since no model learned the data
    references: list[tuple[str, str]]  # names of points of reference, and how they answer
    scores: Scores
    best: Scores
    about_table: str


def sections(shown: Shown) -> Iterator[Section]:
    """Show the table, and folded what is behind it."""
    record = shown.record
    found = decision(record, shown.looks)
    plain = without_pictures(found.table)
    unsaid = answer(record).means_nothing
    view = Mixers(
        table=found.table,
        copied={"csv": plain.csv(), "markdown": plain.markdown(), "latex": plain.latex()},
        axis=found.axis,
        others=[] if unsaid else [row for row in record.outcome.last if row.headline],
        lead=record.lead,
        roles=roles(record),
        ahead=ahead(record),
        left_out=not record.learned,
        references=[(row.name, _about(row, record)) for row in record.references],
        scores=scores(record, record.outcome.last, "after the last epoch"),
        best=scores(record, record.outcome.best, "at the epoch that was best on validation"),
        about_table=shown.page.about_table(record),
    )
    yield Section(name="Mixers", template="sections/mixers.html.j2", view=view)


@dataclass(frozen=True)
class Decision:
    """The table that decides, and what the strips in it show."""

    table: Table
    axis: str


RELATIVE = (
    ("params", "parameters", "count"),
    ("macs", "multiply-adds", "count"),
    ("step_ms", "training step", "ms"),
    ("latency_ms", "latency", "ms"),
    ("peak_mib", "training memory", "mib"),
)


def decision(record: ComparisonRecord, looks: Mapping[str, Look]) -> Decision:
    """Make the table of every mixer against the baseline, the best score first."""
    words, score = wording(record), record.task_kind.score
    drawn = charts.strips(_rows(record, looks), score=score, units=words.units)
    unit = f" {score.difference_unit}" if score.difference_unit else ""
    ends = f"{score.change(drawn.low)} to {score.change(drawn.high)}{unit}"
    most_first = score.better == "more"
    heads = [
        Column("mixer", "mixer", "name"),
        Column(with_unit(f"test {score.label}", score), score.key, "ratio", most_first=most_first),
        Column("from the baseline", "strip", where="people", sort="none", label="intervals"),
        Column(words.changed, "difference", "ratio", most_first=most_first),
        Column(_level(record), "interval", "ratio", sort="none", label="interval"),
        Column("certainty", "certainty"),
    ]
    known = [each for each in RELATIVE if _known(record, each[0])]
    dense = dense_over(record)[0]
    heads += [
        Column(f"{name}, {dense}" if dense and key == "macs" else name, key, "ratio")
        for key, name, _ in known
    ]
    rows: list[tuple[float, list[Any]]] = []
    for row in record.outcome.last:
        mean = row.scores[score.key].mean
        strip = drawn.drawn.get(row.mixer, "")
        cells = [
            *_scored(row, score),
            Cell(None, strip, "strip"),
            *_compared(record, row),
            *(_relative(record, row.mixer, key, cast(Kind, kind)) for key, _, kind in known),
        ]
        rows.append((-float("inf") if mean is None else score.rank(mean), [row.mixer, *cells]))
    for reference in record.references:
        value = reference.scores.get(score.key)
        cells = [
            Cell(value, scored(value, score)),
            Cell(None, "", "strip"),
            *[NOTHING] * 2,
            Cell("reference", "reference", "soft"),
            *[NOTHING] * len(known),
        ]
        rank = -float("inf") if value is None else score.rank(value)
        rows.append((rank, [reference.name, *cells]))
    rows.sort(key=lambda each: -each[0])
    ordered = [cells for _, cells in rows]
    pick = record.recommendation.pick
    marked = frozenset(i for i, cells in enumerate(ordered) if cells[0] == pick)
    title = f"Every mixer against {record.baseline}"
    return Decision(Table("decision", title, heads, ordered, marked=marked), ends)


def roles(record: ComparisonRecord) -> str:
    """Say what the rows of controls and references are, and what recommended means."""
    made = [f"{control_name(label)}: the control" for label in record.controls]
    made += [
        f"{label}: convolutions, no attention, for reference" for label in record.trained_references
    ]
    rule = record.recommendation
    if rule.margin is not None and rule.pick is not None:
        within = record.task_kind.score.changed(rule.margin, sign=False)
        made.append(
            "recommended: the cheapest mixer that keeps up with the best on validation within "
            f"{within}"
        )
    text = "; ".join(made)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def ahead(record: ComparisonRecord) -> str:
    """Say that the best row of the table is no mixer; empty where that is said already."""
    if not record.learned or "reference_ahead" in record.found:
        return ""
    score, base = record.task_kind.score, record.baseline
    means = {
        row.mixer: score.rank(mean)
        for row in record.outcome.last
        if (mean := row.scores[score.key].mean) is not None
    }
    learned = {row.name: row.scores.get(score.key) for row in record.references if row.learned}
    means |= {name: score.rank(mean) for name, mean in learned.items() if mean is not None}
    best = max(means, key=lambda label: means[label], default=base)
    mixers = [means[label] for label in record.named if label in means]
    if best in record.named or base not in means or not mixers or means[best] <= max(mixers):
        return ""
    size = score.changed(means[best] - means[base], sign=False)
    who = control_name(best) if best in record.controls else best
    who = f"the {best}" if best in record.trained_references else who
    cost = relative(record, best, "macs")
    text = f"{who[0].upper()}{who[1:]} is {size} better than {base}"
    return f"{text} at {cost} multiply-adds." if cost else f"{text}."


def _level(record: ComparisonRecord) -> str:
    return f"{100 * (1 - record.alpha):.4g}\u00a0% interval"


def without_pictures(table: Table) -> Table:
    """Return the table without the column of strips, for files."""
    kept = [i for i, column in enumerate(table.columns) if column.key != "strip"]
    rows = [[row[i] for i in kept] for row in table.rows]
    return replace(table, columns=[table.columns[i] for i in kept], rows=rows)


def _rows(record: ComparisonRecord, looks: Mapping[str, Look]) -> list[charts.Row]:
    """List what the strips draw: the difference, both intervals, the difference of each seed."""
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


def _by_seed(record: ComparisonRecord, mixer: str) -> list[float]:
    """Return the difference from the baseline of each seed that both have finished."""
    key = record.task_kind.score.key
    ours, theirs = (
        {run.seed: run.last.test.get(key) for run in record.finished(label)}
        for label in (mixer, record.baseline)
    )
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    return [float(a - b) for a, b in pairs if a is not None and b is not None]


def _scored(row: OutcomeRow, score: Score) -> list[Cell]:
    found = row.scores[score.key]
    if found.mean is None:
        return [Cell(None, "no run finished", "soft")]
    spread = "" if found.sd is None else f" ± {scored(found.sd, score)}"
    return [Cell(found.mean, f"{scored(found.mean, score)}{spread}")]


def _compared(record: ComparisonRecord, row: OutcomeRow) -> list[Cell]:
    """Write the difference with its interval, and how certain it is."""
    score, found = record.task_kind.score, row.interval
    if row.mixer == record.baseline:
        return [Cell(0, "baseline", "soft"), *[NOTHING] * 2]
    if row.seeds is None:
        return [Cell(None, "no pair of runs", "soft"), *[NOTHING] * 2]
    both = Cell(None, interval(found, score))
    degree = row.degree or "reference"
    said = degree if row.direction is None else f"{degree}, {row.direction}"
    return [
        Cell(row.seeds.difference, changed(row.seeds.difference, score)),
        both,
        Cell(said, said),
    ]


def _known(record: ComparisonRecord, key: str) -> bool:
    return any(relative(record, label, key) for label in record.labels)


def _relative(record: ComparisonRecord, mixer: str, key: str, kind: Kind) -> Cell:
    """Write a cost against the baseline's, and the baseline's own."""
    cost = record.costs.get(mixer)
    value = None if cost is None else getattr(cost, key)
    if mixer == record.baseline and value is not None:
        unit = {"ms": " ms", "mib": " MiB"}.get(kind, "")
        return Cell(value, Column("", "", kind).cell(value) + unit, "soft")
    text = relative(record, mixer, key)
    return Cell(value, text) if text else NOTHING


def scores(record: ComparisonRecord, rows: Sequence[OutcomeRow], when: str) -> Scores:
    """Make the table of scores of an epoch, one row per mixer."""
    words, shown = wording(record), columns(record)
    most_first = record.task_kind.score.better == "more"
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
        Column(_level(record), "interval", "ratio", sort="none", label="interval"),
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
    """Write the scores of a mixer, its difference from the baseline, its interval, certainty."""
    if not record.finished(row.mixer):
        return [Cell(None, "no run finished", "soft"), *[NOTHING] * (len(shown) + 2)]
    made = [_spread(row.scores[column.key], column) for column in shown]
    return [*made, *_compared(record, row)]


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


def _ends(interval: Interval | None) -> tuple[float, float] | None:
    if interval is None or interval.low is None or interval.high is None:
        return None
    return (interval.low, interval.high)
