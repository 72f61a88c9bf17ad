# SPDX-License-Identifier: Apache-2.0
"""Frames of a whole set, made once and kept as a memory-mapped array next to the data.

``<folder>/frames-T16-number-128x128.npy`` holds the counts, the ``.json`` next to it what they were
made of: names, sizes and times of the data's files, a hash of each recording's frames, what is
wrong with recordings that cannot be read, and which have fewer events than frames. The array is
written first and both are put in place by renaming, so that a start that is killed leaves nothing
half made. What does not fit its manifest is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.events.cache_dir import Place, place_for, places_of, stamp_of
from keymix.data.events.frames import integrate
from keymix.data.events.recordings import RecordingSet
from keymix.data.events.stream import POLARITIES, Size
from keymix.data.files import threads
from keymix.data.streams import IntArray
from keymix.errors import KeymixWarning, UserError

_THREADS = 4
_PATIENCE = 5.0  # seconds of making frames before the user learns that it takes longer
_CHECKED = 256 << 20  # bytes of frames whose hashes are compared at a start
_KINDS = (np.uint8, np.uint16, np.uint32)
# What reading a manifest and a mapped array raises where they are damaged.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How recordings become frames."""

    time_steps: int  # T, frames per recording
    frames_by: str  # ``number`` or ``time``
    size: Size  # height and width of a frame, pixels

    @property
    def stem(self) -> str:
        """The name of the files that hold such frames."""
        return f"frames-T{self.time_steps}-{self.frames_by}-{self.size[0]}x{self.size[1]}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of a recording's frames, ``[T, 2, H, W]``."""
        return (self.time_steps, POLARITIES, *self.size)


class Frames:
    """The frames of all recordings of a set, in memory or mapped from a file."""

    def __init__(
        self,
        array: NDArray[Any] | Path,
        digests: list[str],
        broken: dict[int, str],
        few: Collection[int] = (),
    ) -> None:
        self.path = array if isinstance(array, Path) else None
        self.digests, self.broken, self.few = digests, broken, frozenset(few)
        self._array = None if isinstance(array, Path) else array

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a worker without the frames, where they are in a file."""
        return self.__dict__ | ({} if self.path is None else {"_array": None})

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
    if recordings.home is None:
        frames = _InMemory((len(recordings), *settings.shape))
        made = _make(recordings, settings, frames)
        return Frames(frames.array, made.digests, made.broken, made.few)
    stamp = stamp_of(recordings, settings.stem)
    for kept in places_of(recordings.home):
        found = _sound(kept, settings, stamp, len(recordings))
        if isinstance(found, Frames):
            return found
    place = place_for(recordings.home)
    with place.writing(), FileLock(place.folder / f".{settings.stem}.lock"):
        found = _sound(place, settings, stamp, len(recordings))  # of another process meanwhile
        if isinstance(found, Frames):
            return found
        if found:
            text = f"the frames kept in {place.folder / settings.stem}.npy are damaged ({found}) "
            warnings.warn(f"{text}and are rebuilt", KeymixWarning, stacklevel=2)
        _keep(place, recordings, settings, stamp)
    found = _sound(place, settings, stamp, len(recordings))
    if not isinstance(found, Frames):
        raise UserError(
            f"the frames in {place.folder} changed while they were made ({found}). Run it again."
        )
    return found


def _sound(place: Place, settings: Settings, stamp: str, count: int) -> Frames | str:
    """Open what is kept; else say why it is damaged, or nothing where it is absent or old."""
    manifest = place.folder / f"{settings.stem}.json"
    if not manifest.exists():
        return ""
    try:
        stored = json.loads(manifest.read_text(encoding="utf-8"))
        if stored["stamp"] != stamp:
            return ""
        return _opened(place.folder / f"{settings.stem}.npy", stored, (count, *settings.shape))
    except _DAMAGE as error:
        return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _opened(path: Path, stored: dict[str, Any], shape: tuple[int, ...]) -> Frames:
    """Open frames that a manifest describes."""
    broken = {int(row): str(why) for row, why in stored["broken"].items()}
    frames = Frames(path, list(stored["digests"]), broken, [int(row) for row in stored["few"]])
    size = path.stat().st_size
    if size != stored["bytes"]:
        raise ValueError(f"{size:,} bytes, {stored['bytes']:,} were written")
    count = shape[0]
    if frames.array.shape != shape or len(frames.digests) != count:
        raise ValueError(f"its shape is {frames.array.shape}")
    checked = min(count, max(1, _CHECKED // max(1, frames.array[0].nbytes)))
    for row in {i * count // checked for i in range(checked)}:
        if row not in broken and _digest(frames.array[row]) != frames.digests[row]:
            raise ValueError(f"the frames of recording {row} are not those that were written")
    return frames


def _keep(place: Place, recordings: RecordingSet, settings: Settings, stamp: str) -> None:
    """Write the frames of a set and their manifest, alone: whoever calls it holds the lock."""
    for left in place.folder.glob(f"{settings.stem}.*.part"):  # by a start that was killed
        left.unlink(missing_ok=True)
    path = place.folder / f"{settings.stem}.npy"
    written = _Written(path.with_suffix(f".{os.getpid()}.part"), (len(recordings), *settings.shape))
    try:
        place.refuse_if_full(written.bytes)
        written.begin()
        made = _make(recordings, settings, written)
        written.end()
        size = written.path.stat().st_size
        (place.folder / f"{settings.stem}.json").unlink(missing_ok=True)
        written.path.replace(path)
    finally:
        written.path.unlink(missing_ok=True)
    place.write_json(
        f"{settings.stem}.json",
        {"stamp": stamp, "bytes": size, **asdict(made)},
    )


@dataclass
class _Made:
    """What is known of frames that were made: see `Frames`."""

    broken: dict[int, str]
    few: list[int]
    digests: list[str]


class _InMemory:
    """Frames in memory, in the narrowest numbers that hold them all."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.array: NDArray[Any] = np.zeros(shape, dtype=_KINDS[0])

    def put(self, row: int, counts: NDArray[Any]) -> None:
        if counts.dtype.itemsize > self.array.dtype.itemsize:
            self.array = self.array.astype(counts.dtype)
        self.array[row] = counts


class _Written:
    """Frames in a file of NumPy's, in the narrowest numbers that hold them all.

    Written with plain writes: a full disk under a mapped file kills the process.
    """

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path, self._shape = path, shape
        self._kind: np.dtype[Any] = np.dtype(_KINDS[0])

    @property
    def bytes(self) -> int:
        return int(np.prod(self._shape, dtype=np.int64)) * self._kind.itemsize

    def begin(self) -> None:
        made = np.lib.format.open_memmap(self.path, mode="w+", dtype=self._kind, shape=self._shape)
        self._offset = int(made.offset)
        del made
        self._file = self.path.open("r+b")

    def put(self, row: int, counts: NDArray[Any]) -> None:
        if counts.dtype.itemsize > self._kind.itemsize:
            self._widen(counts.dtype)
        counts = np.ascontiguousarray(counts, dtype=self._kind)
        self._file.seek(self._offset + row * counts.nbytes)
        self._file.write(counts.data)

    def _widen(self, kind: np.dtype[Any]) -> None:
        """Start again with wider numbers, and copy what is there."""
        self.end()
        narrow = np.load(self.path, mmap_mode="r")
        self.path.unlink()  # the map keeps it
        self._kind = kind
        self.begin()
        for row in range(len(narrow)):
            self.put(row, narrow[row])

    def end(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _make(recordings: RecordingSet, settings: Settings, into: _InMemory | _Written) -> _Made:
    """Read all recordings and put their frames in place."""

    def work(rows: IntArray) -> list[tuple[int, NDArray[Any] | UserError]]:
        return [
            (row, events if isinstance(events, UserError) else _counts(events, settings))
            for row, events in zip(rows.tolist(), recordings.read(rows), strict=True)
        ]

    made = _Made(broken={}, few=[], digests=[""] * len(recordings))
    groups = recordings.groups()
    began, warned = time.monotonic(), False
    with threads(_THREADS) as pool:
        done = 0
        for start in range(0, len(groups), 16 * _THREADS):  # few results wait to be written
            for some in pool.imap(work, groups[start : start + 16 * _THREADS]):
                done += 1
                for row, found in some:
                    if isinstance(found, UserError):
                        made.broken[row] = str(found)
                    else:
                        into.put(row, found)
                        made.digests[row] = _digest(found)
                        if int(found.sum()) < settings.time_steps:  # no event is lost in frames
                            made.few.append(row)
            passed = time.monotonic() - began
            rest = passed / done * (len(groups) - done)
            if isinstance(into, _Written) and min(passed, rest) > _PATIENCE and not warned:
                warned = True
                text = f"frames of {len(recordings):,} recordings are made once, about {rest:.0f} "
                text += "s more; later starts take seconds"
                warnings.warn(text, KeymixWarning, stacklevel=4)
    return made


def _counts(events: Any, settings: Settings) -> NDArray[Any]:
    counts = integrate(
        events,
        time_steps=settings.time_steps,
        frames_by=settings.frames_by,
        size=settings.size,
    )
    return _narrowest(counts)


def _narrowest(counts: NDArray[Any]) -> NDArray[Any]:
    most = int(counts.max())
    return counts.astype(next(kind for kind in _KINDS if most <= np.iinfo(kind).max))


def _digest(counts: NDArray[Any]) -> str:
    """Hash a recording's frames, the same whatever numbers they are kept in."""
    return hashlib.sha256(_narrowest(counts).tobytes()).hexdigest()
