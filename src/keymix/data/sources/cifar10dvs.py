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
from functools import partial
from pathlib import Path

from keymix.data.events.aedat import SENSOR, read_aedat2
from keymix.data.events.cache import Settings, recorded
from keymix.data.events.frames import TIME_STEPS
from keymix.data.events.recordings import alone
from keymix.data.events.stream import Size
from keymix.data.files import folders
from keymix.data.sample import Faults, Source, some
from keymix.data.specs import source
from keymix.errors import UserError, unknown

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
_SPLITS = ("first90", "tebn")


@source(
    "cifar10dvs",
    argument="PATH",
    summary="CIFAR10-DVS: events, PATH/<class>/cifar10_<class>_<number>.aedat; splits first90 "
    "and tebn",
    kind="recording",
    settings=("event_split",),
    on_disk=True,
)
def open_cifar10dvs(
    argument: str,
    faults: Faults,
    *,
    time_steps: int = TIME_STEPS,
    frames_by: str = "number",
    image_size: Size | None = None,
    event_split: str = _SPLITS[0],
) -> Source:
    """Open ``PATH/<class>/cifar10_<class>_<number>.aedat``."""
    if event_split not in _SPLITS:
        raise unknown("data.event_split", event_split, _SPLITS)
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
    recordings: list[tuple[str, int, str]] = []
    for label, name in enumerate(CLASSES):
        found = sorted(f.name for f in (root / name).glob("*.aedat") if not f.name.startswith("."))
        if not found:
            faults.report(
                root / name, f"it has no .aedat files. Download {name}.zip from {ADDRESS}."
            )
        kept = {file: int(of[1]) for file in found if (of := _NUMBER.fullmatch(file))}
        for file in found:
            if file not in kept:
                why = "the name ends in no number, by which recordings are split. Name it "
                faults.report(root / name / file, f"{why}cifar10_{name}_<number>.aedat.")
        first = math.ceil(0.9 * len(kept))
        for k, (file, number) in enumerate(kept.items()):
            train = k < first if event_split == "first90" else number >= _TEBN_TEST
            names.append(f"{name}/{file}")
            recordings.append((str(root / names[-1]), label, "train" if train else "test"))
    if not names:
        raise UserError(f"data cifar10dvs:{argument} has no recordings.")
    return recorded(
        recordings,
        [partial(alone, read_aedat2, root / name) for name in names],
        Settings(SENSOR, time_steps, frames_by, image_size),
        home=root,
        files=names,
        classes=CLASSES,
        notes=() if len(names) == _ALL else (f"{len(names):,} of the set's {_ALL:,} recordings",),
        event_split=event_split,
    )
