# SPDX-License-Identifier: Apache-2.0
"""A folder of recordings of one's own, one folder a class, with or without folders for splits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keymix.data.events.cache_dir import files_stamp, place_for, places_of
from keymix.data.events.files import reading
from keymix.data.events.npz import extent, read_npz
from keymix.data.events.recordings import EventSource, Read, Recordings, RecordingSet
from keymix.data.events.stream import Size
from keymix.data.sources.base import Faults, some
from keymix.data.sources.folder import folders
from keymix.data.specs import DataSpec, existing_folder
from keymix.data.streams import IntArray
from keymix.data.threads import threads
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="events",
        argument="PATH",
        summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with .npz files of events: t, x, "
        "y, p",
        kind="recording",
        on_disk=True,
    ),
)

_VALIDATION = ("val", "validation", "valid")
_THREADS = 4
_EXTENT = "sensor.json"


def open_source(argument: str, faults: Faults) -> EventSource:
    """Open ``PATH/<class>/*.npz`` or ``PATH/{train,val,test}/<class>/*.npz``.

    Files without ``sensor_size`` get the sensor of the others, or the least that all events of the
    set fit on.
    """
    root = existing_folder("events", argument)
    inside = folders(root)
    held_out = [name for name in _VALIDATION if name in inside]
    if len(held_out) > 1:
        raise UserError(f"{root} has both {' and '.join(held_out)}. Keep one of them.")
    divided = "train" in inside
    if not divided and inside and set(inside) <= {"test", *_VALIDATION}:
        raise UserError(f"{root} has {' and '.join(inside)}, but no folder train. Add it.")
    parts = {"train": root / "train" if divided else root}
    if divided:
        parts |= {name: root / name for name in (*held_out, "test") if name in inside}
    classes = folders(parts["train"])
    if not classes:
        raise UserError(
            f"{parts['train']} has no folders inside. Lay recordings as "
            f"{parts['train'].name}/<class>/<name>.npz."
        )
    if len(classes) == 1:
        faults.tell(
            "one class",
            parts["train"],
            f"{parts['train']} has one class only ({classes[0]}); at least 2 are needed, a folder "
            "each.",
        )
    files: list[str] = []
    labels: list[int] = []
    ends: dict[str, slice] = {}
    for name, folder in parts.items():
        start = len(files)
        for file, label in _listed(folder, classes, faults):
            files.append(os.path.relpath(file, root))
            labels.append(label)
        if len(files) == start:
            raise UserError(f"{folder} has no .npz files in class folders. Add some.")
        ends[name] = slice(start, len(files))
    sensor, note = _sensor(root, files)
    whole = Recordings(_Files(root, files, sensor), np.asarray(labels, dtype=np.int64))
    rows = np.arange(len(files), dtype=np.int64)
    tables = {name: whole.select(rows[part]) for name, part in ends.items()}
    left = sorted(set(inside) - set(parts)) if divided else []
    notes = (f"folders left out: {some(left)}",) if left else ()
    return EventSource(
        classes=tuple(classes),
        train=tables["train"],
        val=tables.get(held_out[0]) if held_out and divided else None,
        test=tables.get("test"),
        notes=(*notes, *note),
    )


def _listed(folder: Path, classes: list[str], faults: Faults) -> list[tuple[Path, int]]:
    """List the recordings of a split's class folders, sorted, with their class numbers."""
    found: list[tuple[Path, int]] = []
    for name in folders(folder):
        if name not in classes:
            faults.tell(
                "unknown class",
                folder / name,
                f"{folder / name}: class {name!r} is not in train. Add recordings of it there, or "
                "remove the folder.",
            )
            classes.append(name)
        inside = [file for file in sorted((folder / name).rglob("*")) if not file.is_dir()]
        shown = [file for file in inside if not file.name.startswith(".")]
        some_of_class = [file for file in shown if file.suffix.lower() == ".npz"]
        for file in shown:
            if file.suffix.lower() != ".npz":
                faults.stranger(file)
        if not some_of_class:
            faults.tell(
                "empty class",
                folder / name,
                f"{folder / name}: class {name!r} has no .npz files. Add recordings, or remove the "
                "folder.",
            )
        found += [(file, classes.index(name)) for file in some_of_class]
    return found


def _sensor(root: Path, files: Sequence[str]) -> tuple[Size, tuple[str, ...]]:
    """Find the size of the sensor: what the files say, else the least that all events fit on.

    Found once for files of these names, sizes and times, and kept beside the frames.
    """
    place = place_for(root)
    stamp = hashlib.sha256(files_stamp(root, files)).hexdigest()
    for kept in places_of(root):
        try:
            told = json.loads((kept.folder / _EXTENT).read_text(encoding="utf-8"))
            if told["stamp"] == stamp:
                height, width = told["sensor"]
                return (int(height), int(width)), tuple(map(str, told["notes"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it is found anew

    def look(file: str) -> tuple[Size | None, Size] | None:
        found = _extent(root / file)
        return None if isinstance(found, UserError) else found

    with threads(_THREADS) as pool:
        found = [each for each in pool.imap(look, files) if each is not None]
    own = sorted({size for size, _ in found if size is not None})
    least = [need for _, need in found]
    notes: tuple[str, ...] = ()
    if len(own) > 1:
        first = next(
            root / file for file in files if (e := look(file)) is not None and e[0] == own[1]
        )
        raise UserError(
            f"{first}: its sensor_size is {own[1][0]}x{own[1][1]}, that of others "
            f"{own[0][0]}x{own[0][1]}. Keep recordings of one sensor together."
        )
    if own:
        sensor = own[0]
    else:
        sensor = (max((h for h, _ in least), default=1), max((w for _, w in least), default=1))
        notes = (
            f"no file has sensor_size: the sensor is taken to be {sensor[0]}x{sensor[1]}, the "
            "least that all events fit on",
        )
    with place.writing():
        place.write_json(_EXTENT, {"stamp": stamp, "sensor": list(sensor), "notes": list(notes)})
    return sensor, notes


def _extent(path: Path) -> tuple[Size | None, Size] | UserError:
    """Tell a file's sensor and what its events need, or what is wrong with it."""
    try:
        return extent(path)
    except UserError as error:
        return error


class _Files(RecordingSet):
    """One file a recording."""

    def __init__(self, root: Path, files: Sequence[str], sensor: Size) -> None:
        self.home, self.files, self.sensor = root, files, sensor
        self._root = root

    def __len__(self) -> int:
        return len(self.files)

    def name(self, row: int) -> str:
        return str(self._root / self.files[row])

    def read(self, rows: IntArray) -> list[Read]:
        return [
            reading(lambda path: read_npz(path, self.sensor), self._root / self.files[row])
            for row in rows.tolist()
        ]
