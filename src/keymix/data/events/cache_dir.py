# SPDX-License-Identifier: Apache-2.0
"""Where frames are kept: next to the data, in the folder that KEYMIX_CACHE names, or in the user's.

Where they are changes no result.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keymix.data.events.recordings import RecordingSet
from keymix.errors import UserError

VARIABLE = "KEYMIX_CACHE"
_HIDDEN = ".keymix"
_VERSION = 2  # of the frames' making: another number rebuilds all


@dataclass(frozen=True)
class Place:
    """A folder for the frames of one data set."""

    folder: Path  # the folder; it may not be there yet
    home: Path

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder, and say in one line if it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise self._full(str(error.strerror or error)) from error

    def refuse_if_full(self, size: int) -> None:
        """Refuse before anything is written that the disk has no room for."""
        if shutil.disk_usage(self.folder).free < size:
            raise self._full(f"they take {size / 1e9:.1f} GB, more than is free")

    def _full(self, why: str) -> UserError:
        return UserError(
            f"the frames of {self.home} cannot be kept in {self.folder}: {why}. "
            f"Set {VARIABLE} to a folder with room."
        )

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a file whole or not at all."""
        part = self.folder / f"{name}.{os.getpid()}.part"
        part.write_text(json.dumps(value), encoding="utf-8")
        part.replace(self.folder / name)


def place_for(home: Path) -> Place:
    """Choose where the frames of a data set are kept.

    ``KEYMIX_CACHE`` if it is set, else ``.keymix`` in the data's own folder, else, where that is
    not to be written, ``keymix`` in the user's cache folder.
    """
    home = home.resolve()
    hidden = home / _HIDDEN
    base = os.environ.get(VARIABLE)
    if not base:
        if os.access(hidden if hidden.is_dir() else home, os.W_OK):
            return Place(hidden, home)
        xdg = os.environ.get("XDG_CACHE_HOME")
        base = str((Path(xdg) if xdg else Path.home() / ".cache") / "keymix")
    mark = hashlib.sha256(str(home).encode()).hexdigest()[:12]
    return Place(Path(base).expanduser() / f"{home.name}-{mark}", home)


def places_of(home: Path) -> tuple[Place, ...]:
    """List where frames of a data set may be already: where they are written, or next to it.

    Those next to data that are not to be written were made by somebody who may.
    """
    here, near = place_for(home), Place(home.resolve() / _HIDDEN, home.resolve())
    return (here,) if here == near or os.environ.get(VARIABLE) else (here, near)


def stamp_of(recordings: RecordingSet, stem: str) -> str:
    """Hash what frames depend on: names, sizes and times of the files, the sensor, the settings."""
    assert recordings.home is not None
    return hashlib.sha256(
        f"{_VERSION} {stem} {recordings.sensor} {len(recordings)}\n".encode()
        + files_stamp(recordings.home, recordings.files)
    ).hexdigest()


def files_stamp(home: Path, files: Any) -> bytes:
    """Identify files by name, size and time of the last change."""
    lines = []
    for name in files:
        try:
            status = (home / name).stat()
        except OSError as error:  # such as a link to nowhere; reading it says so by its name
            lines.append(f"{name} {error.errno}\n")
        else:
            lines.append(f"{name} {status.st_size} {status.st_mtime_ns}\n")
    return "".join(lines).encode()
