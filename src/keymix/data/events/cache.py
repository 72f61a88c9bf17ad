# SPDX-License-Identifier: Apache-2.0
"""Recordings as rows: frames of a whole set, made once, which later starts map into memory.

``frames-T16-number-128x128-<key>/`` lies next to the data, in the folder that KEYMIX_CACHE names,
or in the user's cache; the key is of what frames depend on: names, sizes and times of the files,
the sensor, the settings. The folder appears whole or not at all. Where it is changes no result.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.decode import reason
from keymix.data.events.frames import integrate
from keymix.data.events.recordings import Group
from keymix.data.events.stream import POLARITIES, Events, Size
from keymix.data.files import threads
from keymix.data.kinds import RECORDING
from keymix.data.record import DataFacts
from keymix.data.sample import Fault, Row, Source, Stored, refuse
from keymix.errors import KeymixWarning, UserError

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_VERSION = 5  # of the frames' making: another number makes all again
_THREADS = 4
_AT_ONCE = 64  # groups of recordings: few results wait to be written
_MANY = 500  # recordings whose frames take a while
_KINDS = (np.uint8, np.uint16, np.uint32)
_ARRAY, _FACTS = "frames.npy", "recordings.json"


class Known(NamedTuple):
    """What is known of a recording besides its frames."""

    digest: str  # of its frames
    broken: str  # what is wrong with it; empty where nothing is
    few: bool  # whether it has fewer events than frames


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

    def frames(self, found: Events | UserError) -> tuple[NDArray[Any], Known]:
        """Make the frames of a recording, in the narrowest numbers; 0 of one that is broken."""
        if isinstance(found, UserError):
            return np.zeros((), dtype=np.uint8), Known("", str(found), few=False)
        counts = integrate(
            found, time_steps=self.time_steps, frames_by=self.frames_by, size=self.size
        )
        most = int(counts.max())
        made = counts.astype(next(kind for kind in _KINDS if most <= np.iinfo(kind).max))
        digest = hashlib.sha256(made.tobytes()).hexdigest()
        return made, Known(digest, "", few=len(found) < self.time_steps)


class Frames:
    """The frames of all recordings of a set, made or found when one is asked for.

    ``groups`` read recordings that lie together, in the order of all; ``files`` of the folder
    ``home`` are what they depend on, none of data that are no files.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        count: int,
        settings: Settings,
        home: Path | None = None,
        files: Sequence[str] = (),
    ) -> None:
        self.settings, self._count = settings, count
        self._groups, self._home, self._files = groups, home, files

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a worker as the folder where frames are kept, or with them."""
        left = ("_groups", "_files", *(() if self.folder is None else ("array",)))
        self.known  # noqa: B018  # makes what is not made yet
        return {name: value for name, value in self.__dict__.items() if name not in left}

    @cached_property
    def folder(self) -> Path | None:
        """Where they are kept."""
        if self._home is None:
            return None
        of = self.settings
        stem = f"frames-T{of.time_steps}-{of.frames_by}-{of.size[0]}x{of.size[1]}"
        return kept(self._home, self._files, stem, f"{_VERSION} {of}", self._make)

    @cached_property
    def known(self) -> list[Known]:
        """What is known of each recording."""
        if self.folder is not None:
            with self._readable():
                text = (self.folder / _FACTS).read_text(encoding="utf-8")
                return [Known(*each) for each in json.loads(text)]
        stream = io.BytesIO()
        known = self._written(stream)
        stream.seek(0)
        self.array = np.load(stream)
        return known

    @cached_property
    def array(self) -> NDArray[Any]:
        """All frames ``[N, T, 2, H, W]``."""
        assert self.folder is not None  # those in memory came with what is known of them
        with self._readable():
            return np.asarray(np.load(self.folder / _ARRAY, mmap_mode="r"))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Name the folder where what was kept cannot be read."""
        try:
            yield
        except (OSError, ValueError, TypeError, EOFError) as error:
            raise UserError(
                f"frames kept in {self.folder} cannot be read: {reason(error)}. Delete that "
                "folder: they are made again."
            ) from error

    def _make(self, folder: Path) -> None:
        if self._count > _MANY:
            text = f"frames of {self._count:,} recordings are made once; later starts take seconds"
            warnings.warn(text, KeymixWarning, stacklevel=2)
        with (folder / _ARRAY).open("wb") as stream:
            known = self._written(stream)
        (folder / _FACTS).write_text(json.dumps(known), encoding="utf-8")

    def _written(self, stream: BinaryIO) -> list[Known]:
        """Write the frames as ``.npy``; from the start again where they need wider numbers."""
        of, kind = self.settings, np.dtype(np.uint8)
        shape = (of.time_steps, POLARITIES, *of.size)
        while True:
            known: list[Known] = []
            head = {"descr": kind.str, "fortran_order": False, "shape": (self._count, *shape)}
            stream.seek(0)
            np.lib.format.write_array_header_1_0(stream, head)
            for frames, one in self._each():
                if frames.dtype.itemsize > kind.itemsize:
                    kind = frames.dtype
                    break
                stream.write(np.broadcast_to(frames, shape).astype(kind).tobytes())
                known.append(one)
            else:
                return known

    def _each(self) -> Iterator[tuple[NDArray[Any], Known]]:
        def work(read: Group) -> list[tuple[NDArray[Any], Known]]:
            return [self.settings.frames(each) for each in read()]

        with threads(_THREADS) as pool:
            for start in range(0, len(self._groups), _AT_ONCE):
                some = self._groups[start : start + _AT_ONCE]
                yield from chain.from_iterable(pool.imap(work, some))


@dataclass(frozen=True)
class Recorded(Stored):
    """The frames of a recording, counts ``[T, 2, H, W]``."""

    frames: Frames  # of the whole set
    number: int
    id: str

    @property
    def known(self) -> Known:
        """What is known of it."""
        return self.frames.known[self.number]

    def __call__(self) -> Tensor:
        """Copy the frames: uint8, or int32 where a pixel of any counts above 255."""
        self.check(decode=True)
        counts = self.frames.array[self.number]
        return torch.from_numpy(counts.astype(np.uint8 if counts.dtype == np.uint8 else np.int32))

    def check(self, *, decode: bool) -> Size:
        """Refuse a recording that could not be read."""
        if self.known.broken:
            refuse([Fault(self.id, self.known.broken)], "recordings")
        return self.frames.settings.size

    def digest(self, *, content: bool = True) -> bytes:
        """Give the hash of the frames, made with them."""
        return self.known.digest.encode()


def recorded(
    recordings: Sequence[tuple[str, int, str]],
    groups: Sequence[Group],
    settings: Settings,
    *,
    home: Path | None = None,
    files: Sequence[str] = (),
    classes: tuple[str, ...],
    notes: tuple[str, ...] = (),
    event_split: str | None = None,
) -> Source:
    """Make a source of recordings: where each stands, its class number and its split."""
    frames = Frames(groups, len(recordings), settings, home, files)
    facts = DataFacts(
        time_steps=settings.time_steps,
        frames_by=settings.frames_by,
        sensor_size=settings.sensor,
        event_split=event_split,
    )
    rows = [
        Row(id=name, image=Recorded(frames, i, name), target=label, split=split)
        for i, (name, label, split) in enumerate(recordings)
    ]
    return Source(
        kind=RECORDING,
        rows=_Rows(rows, frames),
        in_chans=POLARITIES,
        classes=classes,
        notes=notes,
        facts=facts,
    )


@dataclass(frozen=True)
class _Rows(Sequence[Row]):
    """Rows of recordings; the first that is asked for makes the frames of all, or finds them."""

    rows: Sequence[Row]
    frames: Frames

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i] if self.frames.known else None


def few_events(data: ImageData) -> str:
    """Say in one line that recordings have fewer events than frames; nothing if none has.

    By number, floor(N / T) is 0 then: all events are in the last frame, and the others are empty.
    """
    rows = [row for split in data.splits for row in split.rows]
    few = [row.id for row in rows if isinstance(row.image, Recorded) and row.image.known.few]
    if not few:
        return ""
    return (
        f"recordings of fewer events than T = {data.time_steps}: {len(few):,} of {len(rows):,} "
        f"(first: {few[0]}); frames of them are empty: take fewer time steps"
    )


def kept(
    home: Path, files: Sequence[str], stem: str, more: str, make: Callable[[Path], object]
) -> Path:
    """Return the folder of what was made of some files, or make it: whole or not at all.

    It is found by a hash of ``more`` and of the files' names, sizes and times, and replaces what
    was made of files that have changed.
    """
    home = home.resolve()
    key = hashlib.sha256(more.encode())
    for file in files:
        key.update(f"\n{file}".encode())
        with suppress(OSError):  # such as a link to nowhere; reading it says so by its name
            status = (home / file).stat()
            key.update(f" {status.st_size} {status.st_mtime_ns}".encode())
    name = f"{stem}-{key.hexdigest()[:16]}"
    own = f"{home.name}-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keymix"
    near, place = home / ".keymix", user / own
    if named := os.environ.get("KEYMIX_CACHE"):
        near = place = Path(named).expanduser() / own
    if found := next((at / name for at in (near, place) if (at / name).is_dir()), None):
        return found
    if os.access(near if near.is_dir() else home, os.W_OK):
        place = near
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=place) as part:
            made = Path(part) / name
            made.mkdir()
            make(made)
            try:
                made.rename(place / name)
            except OSError:
                if not (place / name).is_dir():  # else another process was faster
                    raise
        for old in place.glob(f"{stem}-*"):
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{stem} of {home} cannot be kept in {place}: {error.strerror or error}. "
            "Set KEYMIX_CACHE to a folder with room."
        ) from error
    return place / name
