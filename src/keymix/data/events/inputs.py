# SPDX-License-Identifier: Apache-2.0
"""Recordings of events: how they become frames when data are loaded, and are served by position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from keymix.data.augment import Augment
from keymix.data.events.augment import augmented
from keymix.data.events.cache import Frames, Settings, frames_of
from keymix.data.events.frames import TIME_STEPS, check_size
from keymix.data.events.recordings import EventSource, Recordings
from keymix.data.events.stream import Size
from keymix.data.inputs import Inputs, Made, Order, Statistics
from keymix.data.kinds import RECORDING
from keymix.data.loading import Pairs, Preparation
from keymix.data.pixels import picture_of
from keymix.data.record import DataFacts
from keymix.data.sources.base import Faults, Source, Table
from keymix.data.specs import FRAMES_BY, Options, parse
from keymix.data.streams import IntArray
from keymix.data.targets import Digest, Targets
from keymix.errors import UserError, unknown
from keymix.task import Task

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


class RecordedFrames(Inputs):
    """Recordings of events as frames, counts ``[T, C, H, W]``."""

    kind = RECORDING

    def __init__(self, table: Recordings, frames: Frames, image_size: Size, in_chans: int) -> None:
        super().__init__(table, image_size, in_chans)
        self.frames: Frames = frames

    def read(self, i: int) -> Tensor:
        """Copy the frames of recording ``i``."""
        return self.batch(np.array([i], dtype=np.int64))[0]

    def batch(self, index: IntArray) -> Tensor:
        """Copy the frames of some recordings, counts ``[n, T, C, H, W]``."""
        return self.frames.tensor(self.table.set_rows(index))

    def picture(self, i: int) -> Tensor:
        """Show recording ``i``: red where it became darker and blue where brighter."""
        return picture_of(self.read(i))

    @property
    def quick(self) -> bool:
        """Frames are hashed when they are made."""
        return True

    def content(self, i: int, *, whole: bool) -> tuple[bytes, bool]:
        """Give the hash of the frames of recording ``i``."""
        del whole
        (row,) = self.table.set_rows(np.array([i], dtype=np.int64)).tolist()
        return self.frames.digests[row].encode(), False

    def update_digest(self, digest: Digest) -> str:
        """Enter the hashes of the frames."""
        for row in self.table.set_rows(np.arange(len(self), dtype=np.int64)).tolist():
            digest.update(self.frames.digests[row].encode())
        return "frames and {targets}"

    def statistics(self) -> Statistics:
        """Measure nothing: frames are counts."""
        what = "nothing: frames are counts of events and are served as they are"
        return (0.0,) * self.in_chans, (1.0,) * self.in_chans, what

    def make(self, order: Order, targets: Targets, augment: Augment | None, seed: int) -> Made:
        """Read and augment the frames of a batch; its targets are taken by position."""
        epoch, index = order
        frames = self.batch(index)
        if augment is not None:
            flip, wide = augment.flip, augment.snn_wide
            frames = augmented(frames, index, flip=flip, wide=wide, seed=seed, epoch=epoch)
        return Made(frames, torch.from_numpy(index), None)


_OR = (
    "Or leave such recordings out with --data.skip_corrupt true; `keymix data check` names them "
    "all."
)


def sensor_of(spec: str) -> Size:
    """Return height and width of the sensor of a set of recordings, pixels."""
    entry, argument = parse(spec)
    source = entry.open(argument, Faults())
    if not isinstance(source, EventSource):
        raise UserError(f"data {spec} holds images, which have no sensor of events.")
    return source.train.whole.sensor


class EventPreparation(Preparation):
    """What loading does for recordings of events: they become frames."""

    source: EventSource

    def __init__(self, source: Source, spec: str, options: Options, task: Task) -> None:
        super().__init__(source, spec, options, task)
        frames_by = options.frames_by or FRAMES_BY[0]
        if frames_by not in FRAMES_BY:
            raise unknown("data.frames_by", frames_by, FRAMES_BY)
        self.source, self.split_name = _split_by_name(self.source, spec, options.event_split)
        self.sensor = self.source.train.whole.sensor
        self.settings = Settings(
            time_steps=TIME_STEPS if options.time_steps is None else options.time_steps,
            frames_by=frames_by,
            size=check_size(self.sensor, options.image_size),
        )

    def look(self, tables: Mapping[str, Table]) -> None:
        """Make the frames, or find those that were made before."""
        del tables
        self.frames = frames_of(self.source.train.whole, self.settings)

    def broken(self, name: str, table: Table) -> Mapping[int, str]:
        """Say what is wrong with recordings of a split, for one who names them too."""
        del name
        recordings = _recordings(table)
        found = self._broken(recordings).items()
        return {i: recordings.reason(i, why) for i, why in found}

    def check(self, tables: Mapping[str, Table]) -> None:
        """Refuse the first damaged recording."""
        for table in tables.values():
            for why in self._broken(_recordings(table)).values():
                raise UserError(f"{why.rstrip('.')}. {_OR}")

    def pairs(self, tables: dict[str, Table]) -> Pairs:
        """Make the frames of each split, with the targets of its recordings."""
        frames, size, in_chans = self.frames, self.settings.size, self.source.in_chans
        return {
            name: (
                RecordedFrames(_recordings(table), frames, size, in_chans),
                table.targets,
            )
            for name, table in tables.items()
        }

    def facts(self, facts: DataFacts) -> DataFacts:
        """Add how the frames were made."""
        return dataclasses.replace(
            facts,
            time_steps=self.settings.time_steps,
            frames_by=self.settings.frames_by,
            sensor_size=self.sensor,
            event_split=self.split_name,
        )

    def _broken(self, table: Recordings) -> dict[int, str]:
        """Say what is wrong with recordings of a table, by position."""
        rows = table.rows.tolist()
        broken = self.frames.broken
        return {i: broken[row] for i, row in enumerate(rows) if row in broken}


def few_events(data: ImageData) -> str:
    """Say in one line that recordings have fewer events than frames; nothing if none has.

    By number, floor(N / T) is 0 then: all events are in the last frame, and the others are empty.
    """
    few: list[str] = []
    for split in data.splits:
        if isinstance(split.table, Recordings) and split.frames is not None:
            rows = np.flatnonzero(np.isin(split.table.rows, split.frames.few))
            few += [split.table.name(i) for i in rows.tolist()]
    if not few:
        return ""
    return (
        f"recordings of fewer events than T = {data.time_steps}: {len(few):,} of "
        f"{sum(map(len, data.splits)):,} (first: {few[0]}); frames of them are empty: take fewer "
        "time steps"
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


def _recordings(table: Table) -> Recordings:
    assert isinstance(table, Recordings)
    return table
