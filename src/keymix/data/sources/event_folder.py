# SPDX-License-Identifier: Apache-2.0
"""A folder of recordings of one's own, one folder per class, with or without folders for splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from keymix.data.events.cache import Settings, keep, key_of, places
from keymix.data.events.frames import TIME_STEPS
from keymix.data.events.npz import extent, read_npz
from keymix.data.events.recordings import Recordings, alone
from keymix.data.events.rows import FrameRows
from keymix.data.events.stream import POLARITIES, Size
from keymix.data.files import existing_folder, threads
from keymix.data.kinds import RECORDING
from keymix.data.sample import Faults, Source
from keymix.data.sources.folder import classes_in, labelled, split_folders
from keymix.data.specs import source
from keymix.errors import UserError

_THREADS = 4


@source(
    "events",
    argument="PATH",
    summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with .npz files of events: t, x, y, p",
    kind="recording",
    on_disk=True,
)
def open_events(
    argument: str,
    faults: Faults,
    *,
    time_steps: int = TIME_STEPS,
    frames_by: str = "number",
    image_size: Size | None = None,
) -> Source:
    """Open ``PATH/<class>/*.npz`` or ``PATH/{train,val,test}/<class>/*.npz``.

    Files without ``sensor_size`` get the sensor of the others, or the least that all events of the
    set fit on.
    """
    root = existing_folder("events", argument)
    parts, notes = split_folders(root)
    train = parts["train"]
    classes = classes_in(train, faults, f"Arrange recordings as {train.name}/<class>/<name>.npz.")
    files: list[str] = []
    labels: list[int] = []
    splits: list[str] = []
    for split, folder in parts.items():
        found, numbers = labelled(
            root, folder, classes, faults, find=_recordings_below, holds=".npz files"
        )
        files += found
        labels += numbers
        splits += [split] * len(found)
    sensor, note = _sensor(root, files)
    recordings = Recordings(
        ids=[str(root / file) for file in files],
        labels=labels,
        splits=splits,
        groups=[partial(alone, partial(read_npz, sensor=sensor), root / file) for file in files],
        home=root,
        files=files,
    )
    settings = Settings(sensor, time_steps, frames_by, image_size)
    return Source(
        kind=RECORDING,
        rows=FrameRows(recordings, settings),
        classes=tuple(classes),
        in_chans=POLARITIES,
        notes=(*notes, *note),
        facts=settings.facts,
    )


def _recordings_below(folder: Path, faults: Faults) -> list[Path]:
    """List the visible ``.npz`` files of a folder and those below it, sorted."""
    inside = [file for file in sorted(folder.rglob("*")) if not file.is_dir()]
    shown = [file for file in inside if not file.name.startswith(".")]
    for file in shown:
        if file.suffix.lower() != ".npz":
            faults.stranger(file)
    return [file for file in shown if file.suffix.lower() == ".npz"]


def _sensor(root: Path, files: Sequence[str]) -> tuple[Size, tuple[str, ...]]:
    """Find the size of the sensor: what a file says, else the least that all events fit on.

    The latter is found once for files of these names, sizes and times, and kept next to the frames.
    """

    def look(file: str) -> tuple[Size | None, Size] | None:
        try:
            return extent(root / file)
        except UserError:
            return None  # reading it says what is wrong

    name = f"sensor-{key_of(root, files, '')}.json"
    for place in places(root):
        with suppress(OSError, ValueError):
            height, width = json.loads((place / name).read_text(encoding="utf-8"))
            return (int(height), int(width)), _guessed(int(height), int(width))
    least: list[Size] = []
    with threads(_THREADS) as pool:
        for found in pool.imap(look, files):
            if found is not None and found[0] is not None:
                return found[0], ()
            least += [] if found is None else [found[1]]
    sensor = max((h for h, _ in least), default=1), max((w for _, w in least), default=1)
    keep(root, name, lambda file: file.write(json.dumps(sensor).encode()))
    return sensor, _guessed(*sensor)


def _guessed(height: int, width: int) -> tuple[str]:
    note = f"no file has sensor_size: the sensor is taken to be {height}x{width}, the "
    return (f"{note}least that all events fit on",)
