# SPDX-License-Identifier: Apache-2.0
"""Points of reference that no network is trained for: computed once, kept in the folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from keymix.analysis import statistics
from keymix.analysis.answers import Answers
from keymix.data.dataset import ImageData
from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.records import from_json
from keymix.report.record import ReferenceRow
from keymix.task import Task
from keymix.train.files import read_arrays, read_json, write_arrays, write_json
from keymix.train.parts import Reference, answers_of

FACTS, ARRAYS = "references.json", "references.npz"
_WHICH: Literal["last"] = "last"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The content of ``references.json``: what is recorded of each, without its answers."""

    rows: tuple[ReferenceRow, ...]


@dataclass(frozen=True, kw_only=True)
class References:
    """What answers without a trained network: rows of the record, and answers by name."""

    rows: tuple[ReferenceRow, ...] = ()
    answers: Mapping[str, Answers] = field(default_factory=dict)

    def of(self, *, learned: bool) -> dict[str, Answers]:
        """Return the answers of those that learned something, or of those that did not."""
        names = (row.name for row in self.rows if row.learned == learned)
        return {name: self.answers[name] for name in names if name in self.answers}


def compute_references(out: Path, images: ImageData, *, say: Callable[[str], None]) -> None:
    """Compute the points of reference of a comparison, unless its folder keeps them."""
    if known_references(out, images.record()).rows:
        return
    say("computing points of reference")
    task = images.record().task_kind
    rows = []
    arrays: dict[str, Any] = {}
    start = time.perf_counter()
    for i, each in enumerate(answers_of(task).references(images)):
        found = each.evaluated.answers
        rows.append(_row(each, task, time.perf_counter() - start))
        stored = {**found.shared(), **found.arrays(_WHICH)}
        arrays |= {f"{i}/{name}": values for name, values in stored.items()}
        start = time.perf_counter()
    if rows:
        write_arrays(out / ARRAYS, arrays)
        write_json(out / FACTS, Kept(rows=tuple(rows)))


def known_references(out: Path, data: DataRecord) -> References:
    """Return what the folder keeps; nothing where files are missing or damaged."""
    try:
        kept = from_json(Kept, read_json(out / FACTS), where=repr(str(out / FACTS)))
        stored = read_arrays(out / ARRAYS)
        by_row: dict[str, dict[str, Any]] = {}
        for name, values in stored.items():
            row, _, part = name.partition("/")
            by_row.setdefault(row, {})[part] = values
        read = answers_of(data.task_kind).read
        answers = {row.name: read(by_row[str(i)], _WHICH, data) for i, row in enumerate(kept.rows)}
    except (UserError, KeyError):
        return References()
    return References(rows=kept.rows, answers=answers)


def _row(found: Reference, task: Task, seconds: float) -> ReferenceRow:
    """Make the row of a reference: its scores, and the interval of the one that decides."""
    answers = found.evaluated.answers
    estimate = statistics.crossed_mean({0: answers})
    low, high = (None, None) if estimate is None else estimate.ends()
    known = {each.key for each in task.scores}
    return ReferenceRow(
        name=found.name,
        about=found.about,
        learned=found.learned,
        seconds=round(seconds, 2),
        low=low,
        high=high,
        scores={key: value for key, value in found.evaluated.scores.items() if key in known},
        validation=found.validated,
    )
