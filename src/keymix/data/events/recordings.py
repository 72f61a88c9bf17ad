# SPDX-License-Identifier: Apache-2.0
"""Recordings: one file is read by what it says that it is; a source is a set with tables of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from keymix.data.events.aedat import read_aedat2, read_aedat3
from keymix.data.events.frames import TIME_STEPS, integrate, starts
from keymix.data.events.npz import read_npz
from keymix.data.events.stream import EVENT, Events, Size
from keymix.data.files import regular
from keymix.data.kinds import RECORDING, InputKind
from keymix.data.looks import HASH, Look
from keymix.data.record import DataRecord
from keymix.data.sources.base import Fault, Source, Table
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.data.targets import ClassTargets, Targets
from keymix.errors import UserError

SUFFIXES = (".npz", ".aedat")

Read = Events | UserError
"""A recording, or what is wrong with it."""


class RecordingSet(ABC):
    """All recordings of a data set, whatever split they are in.

    Frames are kept for the whole set, so that its splits share them.
    """

    home: Path | None = None
    files: Sequence[str] = ()
    sensor: Size

    @abstractmethod
    def __len__(self) -> int:
        """How many recordings there are."""

    @abstractmethod
    def name(self, row: int) -> str:
        """Say where a recording stands: a file, or a file and a line of its labels."""

    @abstractmethod
    def read(self, rows: IntArray) -> Sequence[Read]:
        """Read recordings that lie together; what is wrong with one comes in its place."""

    def groups(self) -> list[IntArray]:
        """List the rows that are read together, so that no file is read twice."""
        return [np.array([row], dtype=np.int64) for row in range(len(self))]


class RecordingFiles(RecordingSet):
    """One file a recording, below ``home``."""

    def __init__(
        self, home: Path, files: Sequence[str], sensor: Size, read: Callable[[Path], Events]
    ) -> None:
        self._home, self._read = home, read
        self.home, self.files, self.sensor = home, files, sensor

    def __len__(self) -> int:
        return len(self.files)

    def name(self, row: int) -> str:
        """Give the file's path."""
        return str(self._home / self.files[row])

    def read(self, rows: IntArray) -> list[Read]:
        """Read each file."""
        return [reading(self._read, self._home / self.files[row]) for row in rows.tolist()]


class Recordings(Table):
    """Labelled recordings of a set, some of them or all."""

    def __init__(
        self, whole: RecordingSet, targets: IntArray | Targets, rows: IntArray | None = None
    ) -> None:
        self._targets = ClassTargets(targets) if isinstance(targets, np.ndarray) else targets
        self.labels = self._targets.strata
        self.whole = whole
        self.rows = np.arange(len(self._targets), dtype=np.int64) if rows is None else rows

    @property
    def targets(self) -> Targets:
        """What a model is to learn of the recordings."""
        return self._targets

    def name(self, i: int) -> str:
        """Say where recording ``i`` stands."""
        return self.whole.name(int(self.rows[i]))

    def open(self, i: int) -> Image.Image:
        """Refuse: events are no image."""
        raise UserError(f"{self.name(i)} holds events, not an image: this works on images alone.")

    def read(self, i: int) -> Events:
        """Read recording ``i``."""
        (found,) = self.whole.read(self.rows[i : i + 1])
        if isinstance(found, UserError):
            raise found
        return found

    def reason(self, i: int, why: str) -> str:
        """Take the file out of what is wrong with recording ``i``: its name has it already."""
        file, _, rest = why.partition(": ")
        return (rest if rest and self.name(i).startswith(file) else why).rstrip(".")

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash the events of recording ``i``, whatever ``content`` says."""
        return digest_of(self.read(i))

    def set_rows(self, index: IntArray) -> IntArray:
        """Return the rows of recordings in the whole set."""
        return self.rows[index]

    def select(self, rows: IntArray) -> Recordings:
        """Make the view of some rows."""
        return Recordings(self.whole, self._targets.select(rows), self.rows[rows])


@dataclass(frozen=True, kw_only=True)
class EventSource(Source):
    """A source whose tables are `Recordings`."""

    kind: ClassVar[InputKind] = RECORDING
    preparation: ClassVar[str] = "keymix.data.events.inputs:EventPreparation"
    looked: ClassVar[str] = "keymix.data.events.recordings:look_at_recordings"

    train: Recordings
    in_chans: int = 2
    # train and test table of each published split, by its name; ``train`` and ``test`` are those
    # of the first
    named: Mapping[str, tuple[Recordings, Recordings]] = field(default_factory=dict)


def digest_of(events: Events) -> bytes:
    """Hash a recording: its sensor and its events."""
    head = f"{events.sensor}\n".encode()
    return hashlib.sha256(head + events.data.astype(EVENT, copy=False).tobytes()).digest()


def reading(read: Callable[[Path], Events], path: Path) -> Read:
    """Read a recording, or give what is wrong with it in its place."""
    try:
        return read(path)
    except UserError as error:
        return error
    except OSError as error:
        return UserError(f"{path}: cannot be read: {error.strerror or error}.")


def look_at_recordings(
    table: Table, rows: range, source: Source, options: Options
) -> Iterator[Look]:
    """Read some recordings of a table, those of one file together."""
    del source
    assert isinstance(table, Recordings)
    found = table.whole.read(table.rows[rows.start : rows.stop])
    for i, read in zip(rows, found, strict=True):
        if isinstance(read, UserError):
            yield Look(faults=[Fault("unreadable", table.reason(i, str(read)), table.name(i))])
            continue
        height, width = table.whole.sensor
        empty = _empty(read, options.time_steps or TIME_STEPS)
        yield Look(
            hash=digest_of(read)[:HASH],
            size=(width, height),
            remarks={"empty frames": empty} if empty else {},
        )


def _empty(events: Events, time_steps: int) -> str:
    """Say what frames of a recording lack; nothing if each has an event."""
    count = len(events)
    if count < time_steps:  # by number all events are in the last frame
        return f"{count} event{'s' * (count > 1)} for T = {time_steps}"
    first = starts(events["t"], time_steps, "time")
    empty = int((np.diff(first, append=count) == 0).sum())
    return f"{empty} of {time_steps} frames, by time" if empty else ""


def is_recording(name: str) -> bool:
    """Return whether by its name a file holds events and is not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def read_events(path: str | Path, sensor: Size | None = None) -> Events:
    """Read a recording: AEDAT 2.0 of CIFAR10-DVS, AEDAT 3.1, or ``.npz``.

    Args:
        path: The file.
        sensor: Height and width of the sensor, for files that do not say.

    Raises:
        UserError: If it cannot be read, is none of these, or is damaged; in one line that names the
            file and, where there is one, the event.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".npz":
            return read_npz(path, sensor)
        with regular(path).open("rb") as file:
            head = file.read(12)
        if head.startswith(b"#!AER-DAT3"):
            return read_aedat3(path) if sensor is None else read_aedat3(path, sensor)
        return read_aedat2(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None


def read_frames(path: str | Path, record: DataRecord, size: Size) -> Tensor:
    """Read a recording as the frames that a run was trained on.

    Shape: -> int32 ``[T, 2, H, W]``.
    """
    if record.sensor_size is None or record.time_steps is None or record.frames_by is None:
        raise UserError(f"{path}: is a recording of events; the run was trained on images.")
    height, width = record.sensor_size
    events = read_events(path, (height, width))
    if events.sensor != (height, width):
        raise UserError(
            f"{path}: is of a sensor of {events.sensor[0]}x{events.sensor[1]} pixels, the run's "
            f"data of {height}x{width}. Give recordings of the same sensor."
        )
    counts = integrate(events, time_steps=record.time_steps, frames_by=record.frames_by, size=size)
    return torch.from_numpy(counts.astype(np.int32))
