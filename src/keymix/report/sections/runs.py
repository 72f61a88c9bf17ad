# SPDX-License-Identifier: Apache-2.0
"""Two runs next to each other, every run, and what it takes to repeat them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from keymix.report import formats
from keymix.report.formats import with_unit
from keymix.report.part import Section, Shown
from keymix.report.record import OpenRun, Results
from keymix.report.tables import Cell, Column, Table

PLACE = 80
STATUS = {"done": "finished", "failed": "failed", "missing": "not finished"}
"""A run's state in words."""


def sections(shown: Shown) -> Iterator[Section]:
    """Offer two finished runs to the script; show the method, the runs, and what repeats them."""
    record = shown.record
    if sum(len(record.finished(label)) for label in record.labels) > 1:
        yield Section(name="Two runs", template="sections/pair.html.j2")
    view = {
        "table": table(record),
        "seconds": sum(run.seconds for label in record.labels for run in record.finished(label)),
        "who": [who(record, position) for position in range(len(record.trained_with))],
    }
    yield Section(name="Method and runs", template="sections/runs.html.j2", view=view)


def table(record: Results) -> Table:
    """Make the table of runs: scores at both epochs, or why a run did not finish."""
    score = record.task_kind.score
    test = with_unit(f"test {score.label}", score)
    more, several = score.better == "more", len(record.trained_with) > 1
    last, best = (with_unit(f"{which} epoch", score) for which in ("last", "best"))
    columns = [
        Column("mixer", "mixer", "name"),
        Column("seed", "seed", "whole"),
        Column("status", "status", style="state"),
        Column(f"{test} last epoch", "last", "ratio", most_first=more, label=last),
        Column("best epoch on validation", "epoch", "whole", label="best epoch"),
        Column(f"{test} best epoch", "best", "ratio", most_first=more, label=best),
        Column("time", "seconds", "ratio", write=formats.duration),
    ]
    if several:
        columns.append(Column("environment", "environment", "whole"))
    absent = [Cell(None, formats.MISSING, "soft")] * (len(columns) - 3)
    rows: list[list[Any]] = []
    for run in record.runs:
        state, seed = STATUS[run.status], Cell(run.seed, str(run.seed))
        if isinstance(run, OpenRun):
            why = f": {run.reason}" if run.reason else ""
            shown = Markup("<span><b>{}</b>{}</span>").format(state, why)
            rows.append([run.mixer, seed, Cell(state, shown, "state"), *absent])
            continue
        scores = (mark.test[score.key] for mark in (run.last, run.best))
        at_last, at_best = (Cell(value, formats.scored(value, score)) for value in scores)
        epoch = Cell(run.best.epoch, str(run.best.epoch))
        cells = [run.mixer, seed, state, at_last, epoch, at_best, run.seconds]
        rows.append([*cells, *([run.trained_with + 1] if several else [])])
    return Table("runs", "Runs", columns, rows)


def who(record: Results, position: int) -> list[tuple[str, str]]:
    """Return the mixers and seeds trained with an environment."""
    found = []
    for label in record.labels:
        seeds = [run.seed for run in record.finished(label) if run.trained_with == position]
        if seeds:
            word = "seed" if len(seeds) == 1 else "seeds"
            found.append((label, f"{word} {', '.join(map(str, seeds))}"))
    return found
