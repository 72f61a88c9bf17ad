# SPDX-License-Identifier: Apache-2.0
"""From a source of events to train, validation and test splits of frames."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from keymix.data.carve import carve
from keymix.data.dataset import ImageData, Split
from keymix.data.events.frames import check_size
from keymix.data.events.recordings import EventSource, Recordings
from keymix.data.events.store import Frames, Settings, frames_of
from keymix.data.events.stream import Size
from keymix.data.record import DataFacts
from keymix.data.sieve import LeftOut, left_out_note, named_left_out, rows_left_out, sieve
from keymix.data.sources.base import Faults, Source
from keymix.data.specs import FRAMES_BY, parse
from keymix.errors import UserError, unknown

TIME_STEPS = 10
"""Frames a recording where nobody says how many; published results have 10 and 16."""
_OR = (
    "Or leave such recordings out with --data.skip_corrupt true; `keymix data check` names them "
    "all."
)


def sensor_of(spec: str) -> Size:
    """Tell height and width of the sensor of a set of recordings, pixels.

    Raises:
        UserError: If the spec names no recordings, or they cannot be had.
    """
    entry, argument = parse(spec)
    source = entry.open(argument, Faults())
    if not isinstance(source, EventSource):
        raise UserError(f"data {spec} holds images, which have no sensor of events.")
    return source.train.whole.sensor


def load_events(
    source: Source,
    spec: str,
    *,
    time_steps: int | None,
    frames_by: str | None,
    event_split: str | None,
    image_size: Size | None,
    limit: int | None,
    val_fraction: float,
    split_seed: int,
    skip_corrupt: bool,
) -> ImageData:
    """Load recordings as frames; see `keymix.data.loading.load`.

    Raises:
        UserError: If a setting does not fit the data, or a recording is damaged; it is named.
    """
    assert isinstance(source, EventSource)
    frames_by = FRAMES_BY[0] if frames_by is None else frames_by
    if frames_by not in FRAMES_BY:
        raise unknown("data.frames_by", frames_by, FRAMES_BY)
    source, split_name = _split_by_name(source, spec, event_split)
    sensor = source.train.whole.sensor
    settings = Settings(
        time_steps=TIME_STEPS if time_steps is None else time_steps,
        frames_by=frames_by,
        size=check_size(sensor, image_size),
    )
    parts, notes = carve(source, spec, limit, val_fraction, split_seed)
    tables = {name: part.table.select(part.rows) for name, part in parts.items()}
    frames = frames_of(source.train.whole, settings)
    left_out: list[LeftOut] = []
    if skip_corrupt:
        parts, tables, left_out = sieve(
            parts, tables, source, spec, find=lambda table: _reasons(frames, table)
        )
        notes += left_out_note(left_out, source)
    for table in tables.values():
        for why in _broken(frames, table).values():
            raise UserError(f"{why.rstrip('.')}. {_OR}")
    made = {
        name: Split(
            name=name,
            labels=torch.from_numpy(table.labels.copy()),
            images=None,
            frames=frames,
            rows=parts[name].rows,
            origin=parts[name].origin,
            table=table,
            image_size=settings.size,
            in_chans=source.in_chans,
            crop_pct=1.0,
        )
        for name, table in tables.items()
    }
    facts = DataFacts(
        time_steps=settings.time_steps,
        frames_by=settings.frames_by,
        sensor_size=sensor,
        split_seed=split_seed,
        val_fraction=val_fraction,
        limit=limit,
        mean_std_of="nothing: frames are counts of events and are served as they are",
        fingerprint=_fingerprint(tables, frames, rows_left_out(left_out)),
        fingerprint_of="frames and labels",
        notes=tuple(notes),
        left_out=named_left_out(left_out),
        left_out_count=len(left_out),
        event_split=split_name,
    )
    return ImageData(
        spec=spec,
        classes=source.classes,
        image_size=settings.size,
        in_chans=source.in_chans,
        mean=(0.0,) * source.in_chans,
        std=(1.0,) * source.in_chans,
        time_steps=settings.time_steps,
        train=made["train"],
        val=made["val"],
        test=made["test"],
        facts=facts,
    )


def few_events(data: ImageData) -> str:
    """Say in one line that recordings have fewer events than frames; nothing if none has.

    By number, floor(N / T) is 0 then: all events are in the last frame, and the others are empty.
    """
    few = [
        split.table.name(i)
        for split in data.splits
        if isinstance(split.table, Recordings) and split.frames is not None
        for i, row in enumerate(split.table.rows.tolist())
        if row in split.frames.few
    ]
    if not few:
        return ""
    every = sum(map(len, data.splits))
    have, their = ("has", "its") if len(few) == 1 else ("have", "their")
    return (
        f"{len(few):,} of {every:,} recordings {have} fewer events than T = {data.time_steps} "
        f"(first: {few[0]}): some of {their} frames are empty; take fewer time steps"
    )


def _split_by_name(
    source: EventSource, spec: str, name: str | None
) -> tuple[EventSource, str | None]:
    """Take the train and test tables of a published split; the first unless one is named."""
    if not source.named:
        if name is not None:
            raise UserError(
                f"data.event_split = {name!r}: data {spec} has no named splits. Leave it out."
            )
        return source, None
    name = next(iter(source.named)) if name is None else name
    if name not in source.named:
        raise unknown("data.event_split", name, source.named)
    train, test = source.named[name]
    return dataclasses.replace(source, train=train, test=test), name


def _broken(frames: Frames, table: Any) -> dict[int, str]:
    """Say what is wrong with recordings of a table, by position."""
    assert isinstance(table, Recordings)
    rows = table.rows.tolist()
    return {i: frames.broken[row] for i, row in enumerate(rows) if row in frames.broken}


def _reasons(frames: Frames, table: Any) -> dict[int, str]:
    """Say the same for one who names the recording beside it."""
    return {i: table.reason(i, why) for i, why in _broken(frames, table).items()}


def _fingerprint(
    tables: Mapping[str, Any], frames: Frames, left_out: Mapping[str, np.ndarray[Any, Any]]
) -> str:
    whole = hashlib.sha256()
    for name, table in tables.items():
        whole.update(f"{name} {len(table)}\n".encode())
        whole.update(table.labels.astype("<i8").tobytes())
        if len(left_out.get(name, ())):
            whole.update(b"left out " + left_out[name].astype("<i8").tobytes())
        for row in table.rows.tolist():
            whole.update(frames.digests[row].encode())
    return whole.hexdigest()
