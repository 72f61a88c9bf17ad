# SPDX-License-Identifier: Apache-2.0
"""Frames of a whole set, made once and kept as a plain ``.npy`` that later starts map into memory.

``frames-T16-number-128x128-<key>.npy`` lies next to the data, in the folder that KEYMIX_CACHE
names, or in the user's cache; the key is of what frames depend on: names, sizes and times of the
files, the sensor, the settings. A ``.json`` beside it has the hash of each recording's frames, and
what is wrong with those that cannot be read. Both are written under other names first; what does
not load is made again. Where they are changes no result.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.events.frames import integrate
from keymix.data.events.recordings import RecordingSet
from keymix.data.events.stream import POLARITIES, Size
from keymix.data.files import threads
from keymix.data.streams import IntArray
from keymix.errors import KeymixWarning, UserError

_VERSION = 3  # of the frames' making: another number makes all again
_THREADS = 4
_AT_ONCE = 64  # groups of recordings: few results wait to be written
_PATIENCE = 5.0  # seconds of making frames before the user learns that it takes longer
_KINDS = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How recordings become frames."""

    time_steps: int  # T, frames per recording
    frames_by: str  # ``number`` or ``time``
    size: Size  # height and width of a frame, pixels

    @property
    def stem(self) -> str:
        """How the names of files of such frames begin."""
        return f"frames-T{self.time_steps}-{self.frames_by}-{self.size[0]}x{self.size[1]}"


class Frames:
    """The frames of all recordings of a set, in memory or mapped from a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._array: NDArray[Any] | None = None
        self.digests: list[str] = []  # of each recording's frames
        self.broken: dict[int, str] = {}  # what is wrong with a recording
        self.few: list[int] = []  # recordings of fewer events than frames

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a worker without the frames, where they are in a file."""
        return self.__dict__ | ({} if self.path is None else {"_array": None})

    def hold(self, array: NDArray[Any]) -> None:
        """Take frames that stay in memory."""
        self._array = array

    @property
    def array(self) -> NDArray[Any]:
        """All frames ``[N, T, 2, H, W]``."""
        if self._array is None:
            assert self.path is not None
            self._array = np.load(self.path, mmap_mode="r")
        return self._array

    def tensor(self, rows: IntArray) -> Tensor:
        """Copy the frames of some recordings: uint8, or int32 where a pixel counts above 255."""
        counts = np.asarray(self.array[rows])  # a list of rows copies
        return torch.from_numpy(counts if counts.dtype == np.uint8 else counts.astype(np.int32))


def frames_of(recordings: RecordingSet, settings: Settings) -> Frames:
    """Make the frames of a set, or find those that were made before."""
    shape = (len(recordings), settings.time_steps, POLARITIES, *settings.size)
    frames, home = Frames(), recordings.home
    if home is None:
        counts = [*_made(recordings, settings, frames)]
        kind = max((each.dtype for each in counts), key=_width)
        frames.hold(np.stack([np.broadcast_to(each, shape[1:]).astype(kind) for each in counts]))
        return frames
    key = key_of(home, recordings.files, f"{_VERSION} {settings} {recordings.sensor}")
    name = f"{settings.stem}-{key}"
    for place in places(home):
        with suppress(OSError, ValueError, KeyError, TypeError, EOFError):
            return _opened(place / f"{name}.npy", shape)

    def write(file: BinaryIO) -> None:
        nonlocal frames
        for kind in map(np.dtype, _KINDS):
            frames = Frames()
            file.seek(0)
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for found in _made(recordings, settings, frames, say=True):
                if _width(found.dtype) > kind.itemsize:
                    break  # start again with wider numbers
                file.write(np.broadcast_to(found, shape[1:]).astype(kind).tobytes())
            else:
                return

    place = keep(home, f"{name}.npy", write)
    facts = {"digests": frames.digests, "broken": frames.broken, "few": frames.few}
    keep(home, f"{name}.json", lambda file: file.write(json.dumps(facts).encode()))
    for old in place.glob(f"{settings.stem}-*"):  # of files that have changed
        if old.suffix in (".npy", ".json") and old.stem != name:
            old.unlink(missing_ok=True)
    return _opened(place / f"{name}.npy", shape)


def _width(kind: np.dtype[Any]) -> int:
    return kind.itemsize


def _opened(path: Path, shape: tuple[int, ...]) -> Frames:
    stored = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    frames = Frames(path)
    frames.digests, frames.few = stored["digests"], stored["few"]
    frames.broken = {int(row): why for row, why in stored["broken"].items()}
    if frames.array.shape != shape or len(frames.digests) != shape[0]:
        raise ValueError(f"{path} has the shape {frames.array.shape}")
    return frames


def _made(
    recordings: RecordingSet, settings: Settings, frames: Frames, *, say: bool = False
) -> Iterator[NDArray[Any]]:
    """Read all recordings and yield their frames in the narrowest numbers; 0 of broken ones."""

    def work(rows: IntArray) -> list[NDArray[Any] | UserError]:
        return [
            each if isinstance(each, UserError) else _narrowest(integrate(each, **asdict(settings)))
            for each in recordings.read(rows)
        ]

    groups, began = recordings.groups(), time.monotonic()
    with threads(_THREADS) as pool:
        for start in range(0, len(groups), _AT_ONCE):
            done = start + _AT_ONCE
            for found in chain.from_iterable(pool.imap(work, groups[start:done])):
                row = len(frames.digests)
                if isinstance(found, UserError):
                    frames.broken[row] = str(found)
                    frames.digests.append("")
                    yield np.zeros((), dtype=np.uint8)
                    continue
                frames.digests.append(hashlib.sha256(found.tobytes()).hexdigest())
                if int(found.sum()) < settings.time_steps:  # no event is lost in frames
                    frames.few.append(row)
                yield found
            passed = time.monotonic() - began
            rest = passed / done * (len(groups) - done)
            if say and min(passed, rest) > _PATIENCE:
                say = False
                text = f"frames of {len(recordings):,} recordings are made once, about {rest:.0f} "
                text += "s more; later starts take seconds"
                warnings.warn(text, KeymixWarning, stacklevel=2)


def _narrowest(counts: NDArray[Any]) -> NDArray[Any]:
    most = int(counts.max())
    return counts.astype(next(kind for kind in _KINDS if most <= np.iinfo(kind).max))


# ---- where things are kept --------------------------------------------------------------------


def places(home: Path) -> list[Path]:
    """List the folders where something about a data set may be kept."""
    home = home.resolve()
    own = f"{home.name}-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
    named = os.environ.get("KEYMIX_CACHE")
    if named:
        return [Path(named).expanduser() / own]
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [home / ".keymix", user / "keymix" / own]


def key_of(home: Path, files: Sequence[str], more: str) -> str:
    """Hash names, sizes and times of files, and what else something depends on."""
    whole = hashlib.sha256(more.encode())
    for name in files:
        whole.update(f"\n{name}".encode())
        with suppress(OSError):  # such as a link to nowhere; reading it says so by its name
            status = (home / name).stat()
            whole.update(f" {status.st_size} {status.st_mtime_ns}".encode())
    return whole.hexdigest()[:16]


def keep(home: Path, name: str, write: Callable[[BinaryIO], object]) -> Path:
    """Write a file whole or not at all, next to the data where that can be; return its folder."""
    near, *others = places(home)
    place = near
    if others and not os.access(near if near.is_dir() else home, os.W_OK):
        place = others[0]
    part = place / f"{name}.{os.getpid()}.part"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
        part.replace(place / name)
    except OSError as error:
        raise UserError(
            f"{name} of {home} cannot be kept in {place}: {error.strerror or error}. "
            "Set KEYMIX_CACHE to a folder with room."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return place
