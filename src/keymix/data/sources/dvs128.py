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
from functools import partial
from itertools import groupby
from pathlib import Path

from keymix.data.events.aedat import SENSOR, read_aedat3
from keymix.data.events.cache import Settings, recorded
from keymix.data.events.frames import TIME_STEPS
from keymix.data.events.recordings import Read, alone
from keymix.data.events.stream import Size
from keymix.data.files import read_rows, short
from keymix.data.sample import Faults, Source, some
from keymix.data.specs import source
from keymix.errors import UserError

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

    file: Path
    table: Path
    line: int  # the line, from 1
    label: int  # class number, from 0
    start: int  # microseconds, included
    end: int  # microseconds, not included

    @property
    def id(self) -> str:
        """Where it stands."""
        return f"{self.file} ({self.table.name} line {self.line})"


@source(
    "dvs128",
    argument="PATH",
    summary="DVS128 Gesture: events, PATH/DvsGesture/ with .aedat files, labels and lists of "
    "trials",
    kind="recording",
    on_disk=True,
)
def open_dvs128(
    argument: str,
    faults: Faults,
    *,
    time_steps: int = TIME_STEPS,
    frames_by: str = "number",
    image_size: Size | None = None,
) -> Source:
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
    gestures: list[tuple[str, _Gesture]] = []  # with the split of each
    listed: set[str] = set()
    for split, file in lists.items():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        for name in filter(None, map(str.strip, lines)):
            if name in listed:
                why = "it is listed already. Remove it from one list: no recording may be trained "
                faults.report(f"{file}: {name}", f"{why}and tested on.")
                continue
            listed.add(name)
            gestures += [(split, gesture) for gesture in _gestures(root, name, faults)]
    for file in sorted(root.glob(f"*{_LABELS}")):
        recording = root / (file.name.removesuffix(_LABELS) + ".aedat")
        if recording.name not in listed and not recording.is_file():
            faults.report(file, f"there is no recording {recording.name}. Restore or remove one.")
    if {split for split, _ in gestures} != {*lists}:
        raise UserError(f"data dvs128:{argument} has no recordings for training or test.")
    unlisted = [file.name for file in sorted(root.glob("*.aedat")) if file.name not in listed]
    notes = ["validation is split off from training: the same people are in both, and not in test"]
    if unlisted:
        notes.append(f"recordings in neither list, left out: {some(unlisted)}")
    by_file = [
        [gesture for _, gesture in of] for _, of in groupby(gestures, key=lambda each: each[1].file)
    ]
    return recorded(
        [(gesture.id, gesture.label, split) for split, gesture in gestures],
        [partial(_read, of) for of in by_file],
        Settings(SENSOR, time_steps, frames_by, image_size),
        home=root,
        files=[
            *(of[0].file.name for of in by_file),
            *(of[0].table.name for of in by_file),
            *(file.name for file in lists.values()),
        ],
        classes=CLASSES,
        notes=tuple(notes),
    )


def _gestures(root: Path, name: str, faults: Faults) -> list[_Gesture]:
    """Read the labels of a file."""
    table = root / (name.removesuffix(".aedat") + _LABELS)
    for file in (root / name, table):
        if not file.is_file():
            faults.report(file, f"it is missing, and {name} is in the lists. Unpack the set again.")
            return []
    found = []
    for line, row in read_rows(table, _HEAD, faults.report):
        try:
            label, start, end = map(int, row)
        except ValueError:
            label = start = end = -1
        if not 1 <= label <= len(CLASSES) or not 0 <= start < end:
            why = f"it is {short(row)!r}: a class of 1 to {len(CLASSES)}, a start and a later end "
            why += "in whole microseconds are wanted. Correct it."
            faults.report(f"{table}: line {line}", why)
            continue
        found.append(_Gesture(root / name, table, line, label - 1, start, end))
    return found


def _read(gestures: Sequence[_Gesture]) -> list[Read]:
    """Cut the gestures of a file out of it."""
    (whole,) = alone(read_aedat3, gestures[0].file)
    if isinstance(whole, UserError):
        why = str(whole).removeprefix(f"{gestures[0].file}: ")
        return [UserError(f"{gesture.id}: {why}") for gesture in gestures]
    found: list[Read] = []
    for gesture in gestures:
        events = whole.between(gesture.start, gesture.end)
        message = f"{gesture.id}: there is no event from {gesture.start} to {gesture.end} us. "
        found.append(events if len(events) else UserError(f"{message}Correct or remove the line."))
    return found
