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
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.events.frames import integrate
from keymix.data.events.recordings import Read, Recordings
from keymix.data.events.stream import POLARITIES, Events, Size
from keymix.data.files import threads
from keymix.data.record import DataFacts
from keymix.errors import KeymixWarning, UserError

_VERSION = 4  # of the frames' making: another number makes all again
_THREADS = 4
_AT_ONCE = 64  # groups of recordings: few results wait to be written
_PATIENCE = 5.0  # seconds of making frames before the user learns that it takes longer
_KINDS = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True)
class Settings:
    """How recordings become frames."""

    sensor: Size
    time_steps: int  # T, frames per recording
    frames_by: str  # ``number`` or ``time``
    image_size: Size | None  # height and width of a frame, pixels; None for the sensor's

    @property
    def size(self) -> Size:
        """Height and width of a frame."""
        return self.image_size or self.sensor

    @property
    def stem(self) -> str:
        """How the names of files of such frames begin."""
        return f"frames-T{self.time_steps}-{self.frames_by}-{self.size[0]}x{self.size[1]}"

    @property
    def facts(self) -> DataFacts:
        """What a record says of them."""
        return DataFacts(
            time_steps=self.time_steps, frames_by=self.frames_by, sensor_size=self.sensor
        )

    def frames(self, events: Events) -> NDArray[Any]:
        """Make the frames of a recording, in the narrowest numbers that hold its counts."""
        counts = integrate(
            events, time_steps=self.time_steps, frames_by=self.frames_by, size=self.size
        )
        most = int(counts.max())
        return counts.astype(next(kind for kind in _KINDS if most <= np.iinfo(kind).max))


class Frames:
    """The frames of all recordings of a set, in memory or mapped from a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.digests: list[str] = []  # of each recording's frames
        self.broken: dict[int, str] = {}  # what is wrong with a recording
        self.few: set[int] = set()  # recordings of fewer events than frames

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a worker without the frames, where they are in a file."""
        left = () if self.path is None else ("array",)
        return {name: value for name, value in self.__dict__.items() if name not in left}

    @cached_property
    def array(self) -> NDArray[Any]:
        """All frames ``[N, T, 2, H, W]``."""
        assert self.path is not None
        return np.asarray(np.load(self.path, mmap_mode="r"))

    @property
    def size(self) -> Size:
        """Height and width, pixels."""
        height, width = self.array.shape[-2:]
        return height, width

    def read(self, number: int) -> Tensor:
        """Copy the frames of a recording: uint8, or int32 where a pixel of any counts above 255."""
        counts = self.array[number]
        return torch.from_numpy(counts.astype(np.uint8 if counts.dtype == np.uint8 else np.int32))


def frames_of(recordings: Recordings, settings: Settings) -> Frames:
    """Make the frames of a set, or find those that were made before."""
    shape = (len(recordings.ids), settings.time_steps, POLARITIES, *settings.size)
    frames, home = Frames(), recordings.home

    def write(file: BinaryIO) -> None:
        kind = np.dtype(np.uint8)
        while True:
            file.seek(0)
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for found in _made(recordings, settings, frames):
                if found.dtype.itemsize > kind.itemsize:
                    kind = found.dtype
                    break  # start again with wider numbers
                file.write(np.broadcast_to(found, shape[1:]).astype(kind).tobytes())
            else:
                return

    if home is None:
        memory = io.BytesIO()
        write(memory)
        memory.seek(0)
        frames.array = np.load(memory)
        return frames
    name = f"{settings.stem}-{key_of(home, recordings.files, f'{_VERSION} {settings}')}"
    for place in places(home):
        with suppress(OSError, ValueError, KeyError, TypeError, EOFError):
            return _opened(place / f"{name}.npy", shape)
    place = keep(home, f"{name}.npy", write)
    facts = {"digests": frames.digests, "broken": frames.broken, "few": [*frames.few]}
    keep(home, f"{name}.json", lambda file: file.write(json.dumps(facts).encode()))
    for old in place.glob(f"{settings.stem}-*"):  # of files that have changed
        if old.suffix in (".npy", ".json") and old.stem != name:
            old.unlink(missing_ok=True)
    return _opened(place / f"{name}.npy", shape)


def _opened(path: Path, shape: tuple[int, ...]) -> Frames:
    stored = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    frames = Frames(path)
    frames.digests, frames.few = stored["digests"], set(stored["few"])
    frames.broken = {int(number): why for number, why in stored["broken"].items()}
    if frames.array.shape != shape or len(frames.digests) != shape[0]:
        raise ValueError(f"{path} has the shape {frames.array.shape}")
    return frames


def _made(recordings: Recordings, settings: Settings, frames: Frames) -> Iterator[NDArray[Any]]:
    """Read all recordings and yield their frames, 0 of broken ones; note what is of each."""

    def work(read: Callable[[], Sequence[Read]]) -> list[NDArray[Any] | UserError]:
        return [each if isinstance(each, UserError) else settings.frames(each) for each in read()]

    frames.digests, frames.broken, frames.few = [], {}, set()
    groups, began, say = recordings.groups, time.monotonic(), recordings.home is not None
    with threads(_THREADS) as pool:
        for start in range(0, len(groups), _AT_ONCE):
            done = start + _AT_ONCE
            for found in chain.from_iterable(pool.imap(work, groups[start:done])):
                number = len(frames.digests)
                if isinstance(found, UserError):
                    frames.broken[number] = str(found)
                    frames.digests.append("")
                    yield np.zeros((), dtype=np.uint8)
                    continue
                frames.digests.append(hashlib.sha256(found.tobytes()).hexdigest())
                if int(found.sum()) < settings.time_steps:  # no event is lost in frames
                    frames.few.add(number)
                yield found
            passed = time.monotonic() - began
            rest = passed / done * (len(groups) - done)
            if say and min(passed, rest) > _PATIENCE:
                say = False
                text = f"frames of {len(recordings.ids):,} recordings are made once, about "
                text += f"{rest:.0f} s more; later starts take seconds"
                warnings.warn(text, KeymixWarning, stacklevel=2)


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
