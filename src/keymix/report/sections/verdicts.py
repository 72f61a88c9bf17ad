# SPDX-License-Identifier: Apache-2.0
"""What the scores say: verdicts, differences with their intervals, the table of scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from keymix.analysis.statistics import Interval
from keymix.report import charts
from keymix.report.charts import Look, Row
from keymix.report.part import Section, Shown
from keymix.report.record import ComparisonRecord, OutcomeRow
from keymix.report.wording import ScoreColumn, columns, wording

PLACE = 10


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The mixers but the baseline, their differences drawn, and what the table of scores needs."""

    others: list[OutcomeRow]
    forest: Markup | None
    columns: list[ScoreColumn]
    ratio: Mapping[str, str]
    about_table: str


def sections(shown: Shown) -> Iterator[Section]:
    """Show verdicts and scores."""
    record = shown.record
    view = Verdicts(
        others=[row for row in record.outcome.last if row.mixer != record.baseline],
        forest=forest(record, shown.looks),
        columns=columns(record),
        ratio={label: _ratio(record, label) for label in record.labels},
        about_table=shown.page.about_table(record),
    )
    yield Section(template="sections/verdicts.html.j2", view=view)


def _ratio(record: ComparisonRecord, mixer: str) -> str:
    """Say how many of a mixer's runs finished: ``3``, or ``2 of 3``."""
    planned, done = len(record.seeds), len(record.finished(mixer))
    return str(done) if done == planned else f"{done} of {planned}"


def forest(record: ComparisonRecord, looks: Mapping[str, Look]) -> Markup | None:
    """Draw every mixer's difference from the baseline with both intervals."""
    rows = [
        Row(
            label=row.mixer,
            look=looks[row.mixer],
            difference=row.seeds.difference,
            seeds=_ends(row.seeds),
            images=_ends(row.images),
        )
        for row in record.outcome.last
        if row.mixer != record.baseline and row.seeds is not None
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
