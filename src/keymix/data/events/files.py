# SPDX-License-Identifier: Apache-2.0
"""Reads a recording by what its file says that it is."""

from __future__ import annotations

from pathlib import Path

from keymix.data.events.aedat2 import read_aedat2
from keymix.data.events.aedat3 import read_aedat3
from keymix.data.events.npz import read_npz
from keymix.data.events.stream import Events, Size
from keymix.errors import UserError

SUFFIXES = (".npz", ".aedat")


def is_recording(name: str) -> bool:
    """Tell by its name whether a file holds events and is not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def read_events(path: str | Path, sensor: Size | None = None) -> Events:
    """Read a recording: AEDAT 2.0 of CIFAR10-DVS, AEDAT 3.1, or ``.npz``.

    Args:
        path: The file.
        sensor: Height and width of the sensor, for files that do not tell.

    Raises:
        UserError: If it cannot be read, is none of these, or is damaged; in one line that names the
            file and, where there is one, the event.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".npz":
            return read_npz(path, sensor)
        with path.open("rb") as file:
            head = file.read(12)
        if head.startswith(b"#!AER-DAT3"):
            return read_aedat3(path) if sensor is None else read_aedat3(path, sensor)
        return read_aedat2(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None
