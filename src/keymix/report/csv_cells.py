# SPDX-License-Identifier: Apache-2.0
"""CSV for spreadsheets: text that a spreadsheet would take for a formula stays text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet compute a cell."""


def safe(value: Any) -> Any:
    """Put an apostrophe before text that begins as a formula does; numbers stay numbers."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def write(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write a table as CSV with one line a row.

    Args:
        header: Names of the columns.
        rows: Numbers, text, and ``None`` for an empty cell.
    """
    return "".join(_line(row) for row in (header, *rows))


def _line(row: Sequence[Any]) -> str:
    stream = io.StringIO()
    # with this terminator a carriage return inside a cell is quoted, too
    csv.writer(stream, lineterminator="\r\n").writerow([safe(value) for value in row])
    return stream.getvalue().removesuffix("\r\n") + "\n"
