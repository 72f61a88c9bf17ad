# SPDX-License-Identifier: Apache-2.0
"""Where commands speak: tables for a person at a terminal, clean tab-separated lines in a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.console import Console

from keymix.errors import one_line, shown
from keymix.records import to_json
from keymix.report.tables import Table, text_table

out = Console(soft_wrap=True, highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def say(text: str = "") -> None:
    """Write lines of the command's result to standard output; names in them drive no terminal."""
    out.print(shown(text), markup=False)


def say_json(record: object) -> None:
    """Write a record as one line of JSON.

    Args:
        record: What `keymix.records.to_json` takes.
    """
    say(json.dumps(to_json(record), ensure_ascii=False))


def note(text: str) -> None:
    """Write a line for the person, not for a script, to standard error."""
    err.print(shown(text), markup=False, style="dim")


def warn(text: str) -> None:
    """Write a line that matters to standard error."""
    err.print(one_line(text), markup=False)


def line(cells: Iterable[str]) -> None:
    """Write cells as a tab-separated line of the result, for a script."""
    out.file.write("\t".join(map(one_line, cells)) + "\n")  # rich would turn tabs into spaces


def tell_broken(reasons: Iterable[str]) -> int:
    """Name the images that could not be read; return the exit code, 2 if there are any."""
    told = dict.fromkeys(reasons)
    for why in told:
        warn(f"keymix: error: {why}")
    return 2 if told else 0


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 1,
) -> None:
    """Print a table: drawn at a terminal, tab-separated with a header line when piped.

    Args:
        columns: The headings.
        rows: Cells as text, one sequence a row.
        title: A line above the table, shown at a terminal only.
        left: How many leading columns are text (left-aligned); the others are numbers.
    """
    show(text_table(columns, rows, title=title or "", left=left))


def show(made: Table) -> None:
    """Print a table: drawn at a terminal, tab-separated with a header line when piped."""
    if out.is_terminal:
        out.print(made.drawn())
        return
    for row in (made.headings(), *made.cells()):
        line(row)
