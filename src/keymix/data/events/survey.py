# SPDX-License-Identifier: Apache-2.0
"""Reads every recording once and keeps what a check needs: hash, size of the sensor, damage."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keymix.data.events.recordings import Read, Recordings, digest_of
from keymix.data.sources.base import Table
from keymix.data.streams import IntArray
from keymix.data.survey import HASH, Progress, Survey
from keymix.errors import UserError

_THREADS = 4


def survey_events(tables: Mapping[str, Table], progress: Progress) -> dict[str, Survey]:
    """Read every recording of a source's tables, those of one file together.

    Args:
        tables: Views of one set of recordings.
        progress: Called with the number of recordings done since the last call.
    """
    own = {name: table for name, table in tables.items() if isinstance(table, Recordings)}
    whole = next(iter(own.values())).whole
    wanted = np.zeros(len(whole), dtype=bool)
    for table in own.values():
        wanted[table.rows] = True

    def look(rows: IntArray) -> list[bytes | str]:
        return [_seen(read) for read in whole.read(rows)]

    groups = [some for rows in whole.groups() if len(some := rows[wanted[rows]])]
    found: dict[int, bytes | str] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for rows, seen in zip(groups, pool.map(look, groups), strict=True):
            found.update(zip(rows.tolist(), seen, strict=True))
            progress(len(rows))
    return {name: _survey(table, found) for name, table in own.items()}


def _seen(read: Read) -> bytes | str:
    """Hash a recording, or say what is wrong with it."""
    return str(read) if isinstance(read, UserError) else digest_of(read)[:HASH]


def _survey(table: Recordings, found: Mapping[int, bytes | str]) -> Survey:
    count = len(table)
    hashes = np.zeros(count, dtype=f"V{HASH}")
    sizes = np.zeros((count, 2), dtype=np.int64)
    broken: dict[int, str] = {}
    for i, row in enumerate(table.rows.tolist()):
        seen = found[row]
        if isinstance(seen, str):
            broken[i] = seen.removeprefix(f"{table.name(i)}: ").rstrip(".")
        else:
            hashes[i], sizes[i] = np.void(seen), table.whole.sensor[::-1]
    return Survey(hashes, sizes, np.zeros(count, dtype=np.int64), broken)
