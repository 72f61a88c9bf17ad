# SPDX-License-Identifier: Apache-2.0
"""Reads every recording once and keeps what a check needs: hash, size of the sensor, damage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keymix.data.events.frames import TIME_STEPS, starts
from keymix.data.events.recordings import Read, Recordings, digest_of
from keymix.data.events.stream import Events
from keymix.data.files import threads
from keymix.data.sources.base import Faults, Source
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.data.survey import HASH, Progress, Remark, Survey
from keymix.errors import UserError

_THREADS = 4


def _few(time_steps: int, reason: str) -> Remark:
    return Remark(
        f"recordings of fewer events than frames, at T = {time_steps}",
        "by number all events are in the last frame: look at them, or take fewer data.time_steps",
        reason,
    )


def _empty(time_steps: int, reason: str) -> Remark:
    return Remark(
        f"recordings with empty frames by time, at T = {time_steps}",
        "a frame without events shows a model nothing: take fewer data.time_steps, or leave "
        "data.frames_by at number",
        reason,
    )


@dataclass(frozen=True)
class _Seen:
    """What is kept of a whole recording: its hash, and what its frames lack."""

    hash: bytes
    sparse: Remark | None


def survey_events(
    source: Source, faults: Faults, options: Options, progress: Progress
) -> dict[str, Survey]:
    """Read every recording of a source's tables, those of one file together."""
    del faults
    time_steps = options.time_steps or TIME_STEPS
    own = {name: table for name, table in source.tables.items() if isinstance(table, Recordings)}
    whole = next(iter(own.values())).whole
    wanted = np.zeros(len(whole), dtype=bool)
    for table in own.values():
        wanted[table.rows] = True

    def look(rows: IntArray) -> list[_Seen | str]:
        return [_seen(read, time_steps) for read in whole.read(rows)]

    groups = [some for rows in whole.groups() if len(some := rows[wanted[rows]])]
    found: dict[int, _Seen | str] = {}
    with threads(_THREADS) as pool:
        for rows, seen in zip(groups, pool.imap(look, groups), strict=True):
            found.update(zip(rows.tolist(), seen, strict=True))
            progress(len(rows))
    return {name: _survey(table, found) for name, table in own.items()}


def _seen(read: Read, time_steps: int) -> _Seen | str:
    """Hash a recording, or say what is wrong with it."""
    if isinstance(read, UserError):
        return str(read)
    return _Seen(digest_of(read)[:HASH], _sparse(read, time_steps))


def _sparse(events: Events, time_steps: int) -> Remark | None:
    """Say what frames of a recording lack, if anything."""
    count = len(events)
    if count < time_steps:
        return _few(time_steps, "1 event" if count == 1 else f"{count} events")
    first = starts(events["t"], time_steps, "time")
    empty = int((np.diff(first, append=count) == 0).sum())
    return _empty(time_steps, f"{empty} of {time_steps} frames") if empty else None


def _survey(table: Recordings, found: Mapping[int, _Seen | str]) -> Survey:
    survey = Survey(len(table))
    for i, row in enumerate(table.rows.tolist()):
        seen = found[row]
        if isinstance(seen, str):
            survey.broken[i] = table.reason(i, seen)
        else:
            survey.hashes[i], survey.sizes[i] = np.void(seen.hash), table.whole.sensor[::-1]
            if seen.sparse is not None:
                survey.remarks[i] = seen.sparse
    return survey
