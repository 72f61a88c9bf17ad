# SPDX-License-Identifier: Apache-2.0
"""DVS128 Gesture: eleven gestures of 29 people, recorded at 128x128 pixels.

Paper: Amir et al., "A Low Power, Fully Event-Based Gesture Recognition System", CVPR 2017. A file
holds all gestures of a person under one light; the table of labels next to it says which gesture is
made from when to when, and each of its lines is a recording here (start included, end not). The
set's own lists say which files are for training and which for test: 1,176 and 288 recordings, as
SpikingJelly counts them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keymix.data.events.aedat import SENSOR, read_aedat3
from keymix.data.events.recordings import EventSource, Read, Recordings, RecordingSet, reading
from keymix.data.files import short
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
    listed: dict[str, Path] = {}
    for file in lists.values():
        for name in _listed(file):
            if name in listed:
                faults.report(
                    "recordings listed twice",
                    f"{file}: {name}",
                    f"{file}: {name} is in {listed[name].name} already. Remove it from one list: "
                    "no recording may be trained and tested on.",
                )
                continue
            listed[name] = file
            gestures += _gestures(root, name, file, faults)
        ends.append(len(gestures))
    for file in sorted(root.glob(f"*{_LABELS}")):
        recording = file.name.removesuffix(_LABELS) + ".aedat"
        if not (root / recording).is_file():
            faults.report(
                "labels without recording",
                file,
                f"{file}: there is no recording {recording} for these labels. Restore or remove "
                "one of them.",
            )
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


def _listed(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _gestures(root: Path, name: str, listed_in: Path, faults: Faults) -> list[_Gesture]:
    """Read the labels of a file."""
    path = root / name
    if not path.is_file():
        faults.report(
            "labels without recording",
            path,
            f"{path} is not there, and {listed_in} names it. Unpack the set again.",
        )
        return []
    table = root / (name.removesuffix(".aedat") + _LABELS)
    if not table.is_file():
        faults.report(
            "recording without labels",
            path,
            f"{path}: there are no labels {table.name} for this recording. Restore them.",
        )
        return []
    try:
        with table.open(encoding="utf-8", errors="replace", newline="") as stream:
            rows = list(csv.reader(stream))
    except (OSError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        faults.report("bad label", table, f"{table}: cannot be read: {why}. Restore the file.")
        return []
    if not rows or [cell.strip() for cell in rows[0]] != _HEAD:
        message = f"{table}: the first line is not {','.join(_HEAD)!r}. Restore the file."
        faults.report("bad label", table, message)
        return []
    found = []
    for line, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        try:
            label, start, end = map(int, row)
        except ValueError:
            message = f"{table}: line {line} is {short(row)!r}; a class and two times in whole "
            faults.report("bad label", f"{table}:{line}", f"{message}microseconds are wanted.")
            continue
        why = ""
        if not 1 <= label <= len(CLASSES):
            why = f"the class {label}; there are 1 to {len(CLASSES)}"
        elif not 0 <= start < end:
            why = f"the times {start} to {end}; the end must come after the start"
        if why:
            message = f"{table}: line {line} has {why}. Correct or remove it."
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
