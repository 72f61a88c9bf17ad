# SPDX-License-Identifier: Apache-2.0
"""Recordings in files, each read by what it says that it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from keymix.data.events.aedat import content_of, read_aedat2, read_aedat3
from keymix.data.events.frames import integrate
from keymix.data.events.npz import read_npz
from keymix.data.events.stream import Events, Size
from keymix.data.record import DataRecord
from keymix.errors import UserError

SUFFIXES = (".npz", ".aedat")

Read = Events | UserError
"""A recording, or what is wrong with it."""
Group = Callable[[], Sequence[Read]]
"""Reads recordings that lie together; what is wrong with one comes in its place."""


def alone(read: Callable[[Path], Events], path: Path) -> list[Read]:
    """Read a file, as a group of one recording."""
    try:
        return [read(path)]
    except UserError as error:
        return [error]


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
    if path.suffix.lower() == ".npz":
        return read_npz(path, sensor)
    if content_of(path).startswith(b"#!AER-DAT3"):
        return read_aedat3(path) if sensor is None else read_aedat3(path, sensor)
    return read_aedat2(path)


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
