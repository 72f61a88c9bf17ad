# SPDX-License-Identifier: Apache-2.0
"""DVS128 Gesture: eleven gestures of 29 people, recorded at 128x128 pixels.

Paper: Amir et al., "A Low Power, Fully Event-Based Gesture Recognition System", CVPR 2017. A file
holds all gestures of a person under one light; the table of labels next to it says which gesture is
made from when to when, and each of its lines is a recording here (start included, end not). The
set's own lists say which files are for training and which for test: 1,176 and 288 recordings, as
SpikingJelly counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keymix.data.events.aedat import SENSOR, read_aedat3
from keymix.data.events.recordings import EventSource, Read, Recordings, RecordingSet, reading
from keymix.data.files import read_rows, short
from keymix.data.sources.base import Faults, some
from keymix.data.specs import DataSpec
from keymix.data.streams import IntArray
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="dvs128",
        argument="PATH",
        summary="DVS128 Gesture: events, PATH/DvsGesture/ with .aedat files, labels and lists of "
        "trials",
        kind="recording",
        on_disk=True,
    ),
)

CLASSES = (
    "hand_clapping",
    "right_hand_wave",
    "left_hand_wave",
    "right_arm_clockwise",
    "right_arm_counter_clockwise",
    "left_arm_clockwise",
    "left_arm_counter_clockwise",
    "arm_roll",
    "air_drums",
    "air_guitar",
    "other_gestures",
)
ADDRESS = "https://ibm.ent.box.com/s/3hiq58ww1pbbjrinh367ykfdf60xsfm8/folder/50167556794"
_FOLDER = "DvsGesture"
_LABELS = "_labels.csv"
_HEAD = ["class", "startTime_usec", "endTime_usec"]


@dataclass(frozen=True)
class _Gesture:
    """A line of a table of labels."""

    file: str
    line: int  # the line, from 1
    label: int  # class number, from 0
    start: int  # microseconds, included
    end: int  # microseconds, not included


def open_source(argument: str, faults: Faults) -> EventSource:
    """Open the folder ``DvsGesture``, or the one that holds it."""
    root = Path(argument).expanduser()
    root = root / _FOLDER if (root / _FOLDER).is_dir() else root
    lists = {split: root / f"trials_to_{split}.txt" for split in ("train", "test")}
    for file in lists.values():
        if not file.is_file():
            raise UserError(
                f"data dvs128:{argument}: there is no {file}. Download DvsGesture.tar.gz from "
                f"{ADDRESS} and unpack it to PATH/DvsGesture/trials_to_train.txt, "
                "user01_fluorescent.aedat, user01_fluorescent_labels.csv and so on."
            )
    gestures: list[_Gesture] = []
    ends: list[int] = []
    listed: set[str] = set()
    for file in lists.values():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        for name in filter(None, map(str.strip, lines)):
            if name in listed:
                message = f"{file}: {name} is listed already. Remove it from one list: no "
                message += "recording may be trained and tested on."
                faults.report("bad row", f"{file}: {name}", message)
                continue
            listed.add(name)
            gestures += _gestures(root, name, faults)
        ends.append(len(gestures))
    for file in sorted(root.glob(f"*{_LABELS}")):
        recording = root / (file.name.removesuffix(_LABELS) + ".aedat")
        if recording.name not in listed and not recording.is_file():
            message = f"{file}: there is no recording {recording.name}. Restore or remove one."
            faults.report("missing", file, message)
    if not 0 < ends[0] < ends[1]:
        raise UserError(f"data dvs128:{argument} has no recordings for training or test.")
    unlisted = [file.name for file in sorted(root.glob("*.aedat")) if file.name not in listed]
    notes = ["validation is split off from training: the same people are in both, and not in test"]
    if unlisted:
        notes.append(f"recordings in neither list, left out: {some(unlisted)}")
    labels = np.array([gesture.label for gesture in gestures], dtype=np.int64)
    whole = Recordings(_Gestures(root, gestures), labels)
    rows = np.arange(len(gestures), dtype=np.int64)
    return EventSource(
        classes=CLASSES,
        train=whole.select(rows[: ends[0]]),
        test=whole.select(rows[ends[0] :]),
        notes=tuple(notes),
    )


def _gestures(root: Path, name: str, faults: Faults) -> list[_Gesture]:
    """Read the labels of a file."""
    table = root / (name.removesuffix(".aedat") + _LABELS)
    for file in (root / name, table):
        if not file.is_file():
            message = f"{file} is missing, and {name} is in the lists. Unpack the set again."
            faults.report("missing", file, message)
            return []
    found = []
    for line, row in read_rows(table, _HEAD, faults.report):
        try:
            label, start, end = map(int, row)
        except ValueError:
            label = start = end = -1
        if not 1 <= label <= len(CLASSES) or not 0 <= start < end:
            message = f"{table}: line {line} is {short(row)!r}: a class of 1 to {len(CLASSES)}, a "
            message += "start and a later end in whole microseconds are wanted. Correct it."
            faults.report("bad label", f"{table}:{line}", message)
            continue
        found.append(_Gesture(name, line, label - 1, start, end))
    return found


class _Gestures(RecordingSet):
    """Stretches of files, one per line of labels."""

    def __init__(self, root: Path, gestures: Sequence[_Gesture]) -> None:
        self.home, self.sensor = root, SENSOR
        names = dict.fromkeys(gesture.file for gesture in gestures)
        tables = [name.removesuffix(".aedat") + _LABELS for name in names]
        self.files = [*names, *tables, "trials_to_train.txt", "trials_to_test.txt"]
        self._root, self._gestures = root, gestures

    def __len__(self) -> int:
        return len(self._gestures)

    def name(self, row: int) -> str:
        gesture = self._gestures[row]
        table = gesture.file.removesuffix(".aedat") + _LABELS
        return f"{self._root / gesture.file} ({table} line {gesture.line})"

    def groups(self) -> list[IntArray]:
        rows: dict[str, list[int]] = {}
        for row, gesture in enumerate(self._gestures):
            rows.setdefault(gesture.file, []).append(row)
        return [np.array(some, dtype=np.int64) for some in rows.values()]

    def read(self, rows: IntArray) -> list[Read]:
        read: dict[str, Read] = {}
        found: list[Read] = []
        for row in rows.tolist():
            gesture = self._gestures[row]
            if gesture.file not in read:
                read[gesture.file] = reading(read_aedat3, self._root / gesture.file)
            events = read[gesture.file]
            if not isinstance(events, UserError):
                events = events.between(gesture.start, gesture.end)
                if not len(events):
                    events = UserError(
                        f"{self.name(row)}: there is no event from {gesture.start} to "
                        f"{gesture.end} us. Correct or remove the line."
                    )
            found.append(events)
        return found
