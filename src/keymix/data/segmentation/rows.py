# SPDX-License-Identifier: Apache-2.0
"""Reads the CSV files of a data set, row by row, with the number of each line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from keymix.data.regular import regular
from keymix.data.sources.base import Faults
from keymix.errors import UserError

_LONGEST = 1 << 26  # characters of a cell: run lengths of large images pass Python's 131,072
_SHOWN = 60


def read_rows(
    path: Path, columns: Sequence[str], faults: Faults, *, kind: str = "bad row"
) -> list[tuple[int, tuple[str, ...]]]:
    """Read some columns of a CSV file, wherever they stand.

    Returns the line that each row ends on, and its cells in the order of ``columns``, stripped.
    """
    before = csv.field_size_limit(_LONGEST)
    try:
        with regular(path).open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            head = [cell.strip() for cell in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}. Restore it.") from error
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}. Restore the file.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Restore it.") from error
    finally:
        csv.field_size_limit(before)
    places = []
    for column in columns:
        given = [name for name in column.split("|") if name in head]
        if not given:
            raise UserError(
                f"{path}: the first line has no column {column.replace('|', ' or ')}; it is "
                f"{_short(head)!r}. Name the columns {','.join(columns)}."
            )
        places.append(head.index(given[0]))
    if not rows:
        raise UserError(f"{path} has no rows below its first line. Restore it.")
    found = []
    for line, row in rows:
        if len(row) != len(head):
            faults.tell(
                kind,
                f"{path}:{line}",
                f"{path}: line {line} has {len(row)} cells, not {len(head)}: {_short(row)!r}. "
                "Correct or remove it.",
            )
            continue
        found.append((line, tuple(row[place].strip() for place in places)))
    return found


def _short(row: Sequence[str]) -> str:
    line = ",".join(row)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
