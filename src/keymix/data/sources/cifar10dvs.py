# SPDX-License-Identifier: Apache-2.0
"""CIFAR10-DVS: 10,000 recordings of moving CIFAR-10 images by a camera of 128x128 pixels.

Paper: Li et al. 2017, https://doi.org/10.3389/fnins.2017.00309. The set has no split of its own;
papers use two, whose accuracies do not compare:

- ``first90``: of each class the first 90 % of the files, sorted by name as text, are for training,
  as SpikingJelly's ``split_to_train_test_set(0.9, …)`` splits its folder without shuffling. With
  all 1,000 files per class, test has the numbers 909, 91-99 and 910-999.
- ``tebn``: the numbers 0-99 of each class are the test split, 100-999 are for training (TEBN, Duan
  et al. 2022; SpikingJelly's ``CIFAR10DVSTEBNSplit``). Its accuracies are higher.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keymix.data.events.aedat import SENSOR, read_aedat2
from keymix.data.events.recordings import EventSource, RecordingFiles, Recordings
from keymix.data.files import folders
from keymix.data.sources.base import Faults, some
from keymix.data.specs import DataSpec
from keymix.data.streams import IntArray
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="cifar10dvs",
        argument="PATH",
        summary="CIFAR10-DVS: events, PATH/<class>/cifar10_<class>_<number>.aedat; splits first90 "
        "and tebn",
        kind="recording",
        on_disk=True,
    ),
)

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
ADDRESS = "https://figshare.com/articles/dataset/CIFAR10-DVS_New/4724671"
_ALL = 10_000  # recordings
_NUMBER = re.compile(r".*_(\d+)\.aedat")
_TEBN_TEST = 100


def open_source(argument: str, faults: Faults) -> EventSource:
    """Open ``PATH/<class>/cifar10_<class>_<number>.aedat``."""
    root = Path(argument).expanduser()
    inside = folders(root) if root.is_dir() else []
    missing = [name for name in CLASSES if name not in inside]
    if missing:
        where = f"has no folder {some(missing)}" if root.is_dir() else "is not there"
        raise UserError(
            f"data cifar10dvs:{argument} {where}. Download the ten archives from {ADDRESS} and "
            "unpack them to PATH/airplane/cifar10_airplane_0.aedat and so on."
        )
    names: list[str] = []
    labels: list[int] = []
    numbers: list[int] = []
    for label, name in enumerate(CLASSES):
        found = sorted(f.name for f in (root / name).glob("*.aedat") if not f.name.startswith("."))
        if not found:
            message = f"{root / name} has no .aedat files. Download {name}.zip from {ADDRESS}."
            faults.report("empty class", root / name, message)
        for file in found:
            number = _NUMBER.fullmatch(file)
            if number is None:
                message = f"{root / name / file}: the name ends in no number, by which recordings "
                message += f"are split. Name it cifar10_{name}_<number>.aedat."
                faults.report("bad label", root / name / file, message)
                continue
            names.append(f"{name}/{file}")
            labels.append(label)
            numbers.append(int(number[1]))
    if not names:
        raise UserError(f"data cifar10dvs:{argument} has no recordings.")
    notes = () if len(names) == _ALL else (f"{len(names):,} of the set's {_ALL:,} recordings",)
    whole = Recordings(
        RecordingFiles(root, names, SENSOR, read_aedat2), np.asarray(labels, dtype=np.int64)
    )
    named = {
        "first90": _divided(whole, _first90(whole.labels)),
        "tebn": _divided(whole, np.asarray(numbers) >= _TEBN_TEST),
    }
    train, test = named["first90"]
    return EventSource(classes=CLASSES, train=train, test=test, named=named, notes=notes)


def _first90(labels: IntArray) -> NDArray[np.bool_]:
    """Mark the first 90 % of each class's rows, rounded up."""
    first = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        first[rows[: math.ceil(0.9 * len(rows))]] = True
    return first


def _divided(whole: Recordings, train: NDArray[np.bool_]) -> tuple[Recordings, Recordings]:
    return whole.select(np.flatnonzero(train)), whole.select(np.flatnonzero(~train))
