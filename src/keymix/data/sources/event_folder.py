# SPDX-License-Identifier: Apache-2.0
"""A folder of recordings of one's own, one folder per class, with or without folders for splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from keymix.data.events.cache import Settings, kept, recorded
from keymix.data.events.frames import TIME_STEPS
from keymix.data.events.npz import extent, read_npz
from keymix.data.events.recordings import alone
from keymix.data.events.stream import Size
from keymix.data.files import existing_folder, threads
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
    recordings: list[tuple[str, int, str]] = []
    files: list[str] = []
    for split, folder in parts.items():
        found, labels = labelled(
            root, folder, classes, faults, find=_recordings_below, holds=".npz files"
        )
        files += found
        recordings += [
            (str(root / file), label, split) for file, label in zip(found, labels, strict=True)
        ]
    sensor, note = _sensor(root, files)
    return recorded(
        recordings,
        [partial(alone, partial(read_npz, sensor=sensor), root / file) for file in files],
        Settings(sensor, time_steps, frames_by, image_size),
        home=root,
        files=files,
        classes=tuple(classes),
        notes=(*notes, *note),
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

    The latter is found once for these files, and kept next to the frames.
    """

    def make(folder: Path) -> None:
        own, least = None, (1, 1)
        with threads(_THREADS) as pool:
            for found in pool.imap(look, files):
                if found is None:
                    continue
                if (own := found[0]) is not None:
                    break
                least = max(least[0], found[1][0]), max(least[1], found[1][1])
        (folder / "sensor.json").write_text(json.dumps([own or least, own is None]), "utf-8")

    def look(file: str) -> tuple[Size | None, Size] | None:
        try:
            return extent(root / file)
        except UserError:
            return None  # reading it says what is wrong

    if (first := look(files[0])) is not None and first[0] is not None:
        return first[0], ()
    folder = kept(root, files, "sensor", "", make)
    (height, width), guessed = json.loads((folder / "sensor.json").read_text("utf-8"))
    note = f"no file has sensor_size: the sensor is taken to be {height}x{width}, the "
    return (height, width), (f"{note}least that all events fit on",) if guessed else ()
