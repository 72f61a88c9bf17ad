# SPDX-License-Identifier: Apache-2.0
"""The UW-Madison GI Tract set as it is: run lengths in a CSV, 16-bit slices in folders of cases.

https://www.kaggle.com/competitions/uw-madison-gi-tract-image-segmentation. A slice's file is
``train/case101/case101_day20/scans/slice_0078_266_266_1.50_1.50.png``; `keymix.data.slices` says
what its name says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torchvision import tv_tensors

from keymix.data import rle
from keymix.data.files import existing_path, read_rows
from keymix.data.findings import FALSIFIES, WARNING
from keymix.data.kinds import BACKGROUND, IMAGE, SLICES
from keymix.data.mask_facts import report_shared_cases
from keymix.data.record import DataFacts
from keymix.data.sample import SPLITS, Fault, Faults, Row, Size, Source, some
from keymix.data.slices import DAY, FILE, Stack, neighbours, spacing_of, stated_size
from keymix.data.specs import MASKS, source
from keymix.errors import UserError

ORGANS = ("large_bowel", "small_bowel", "stomach")
_ID = re.compile(r"(case[0-9]+)_day([0-9]+)_slice_([0-9]{4}|[1-9][0-9]{4,})")
_FEW = 0.1  # of the slices may lack a row where no row says that an organ is absent

_Runs = Sequence[tuple[int, rle.Runs]]  # number of an organ and its runs, for each that is there
_Files = Mapping[tuple[str, str], Mapping[int, Sequence[Path]]]  # by case and day, by number


@source(
    "uwgi",
    argument="PATH",
    summary="UW-Madison GI Tract: PATH/train.csv with run lengths and 16-bit slices under "
    "PATH/train/case*/; masks of three organs",
    kind="slices",
    task="segmentation",
    target="mask",
    settings=("intensity_window",),
    on_disk=True,
)
def open_uwgi(
    argument: str,
    faults: Faults,
    *,
    masks: str = MASKS[False],
    stack: int = 1,
    split_by: str | None = None,
    intensity_window: tuple[float, float] | None = None,
) -> Source:
    """Open ``PATH/train.csv`` and ``PATH/train/``, and ``PATH/splits.csv`` if it is there.

    A slice is what ``train.csv`` has rows of; a slice without run lengths has no organ. Slices
    without any row are left out, but may be a neighbour in a stack. ``splits.csv`` gives a split
    (``train``, ``val``, ``test``) to each ``case`` or each ``id``.
    """
    if stack < 1 or stack % 2 == 0:
        raise UserError(f"data.stack = {stack}: it must be an odd number of slices, such as 3.")
    root = existing_path("uwgi", argument)
    table = root / "train.csv"
    if not table.is_file() or not (root / "train").is_dir():
        raise UserError(
            f"data uwgi:{argument}: {root} is not a folder with train.csv and train/. Give the "
            "folder that the competition's archive was unpacked into."
        )
    files = _files(root, faults)
    slices = _slices(table, files, faults)
    pins = root / "splits.csv"
    splits = _splits(pins, slices, faults) if pins.exists() else {}
    multilabel = masks == MASKS[True]
    rows, over, replaced = [], [], 0
    for name, one in slices.items():
        own = one.files[0] if one.files else _missing(root, name)
        numbers = files.get((one.case, one.day), {})
        stacked, others = neighbours(numbers, one.number, own, stack)
        replaced += others
        if not multilabel and len(one.runs) > 1:
            pixels = rle.overlap([runs for _, runs in one.runs])
            over += [(str(own), pixels)] if pixels else []
        row = Row(
            id=str(own),
            image=Stack(stacked, one.size if one.files else None, intensity_window),
            target=partial(_mask, one.runs, one.size, multilabel=multilabel),
            split=splits.get(name, ""),
            group=one.case,
            name=name,
            spacing=spacing_of(own.name) if one.files else None,
            faults=one.faults,
        )
        rows.append(row)
    if splits and split_by != "slice":
        report_shared_cases(rows, faults)
    extra = sum(map(len, files.values())) - sum(bool(one.files) for one in slices.values())
    level, unlisted = _unlisted(slices)
    notes = [f"{extra} slices without a row in train.csv left out"] if extra else []
    if over:
        notes.append(
            f"classes overlap in {sum(pixels for _, pixels in over):,} pixels of {len(over):,} "
            f"image{'s' * (len(over) > 1)}: the later class is kept "
            "(task.options.masks=multilabel keeps all)"
        )
    if replaced:
        notes.append(
            f"{replaced:,} missing neighbours in the stacks replaced by the nearest slice on the "
            "way to them"
        )
    if unlisted:
        ids = some([item["id"] for item in unlisted], 3)
        notes.append(f"slices without a row for an organ, which count as without it: {ids}")
    overlaps = [
        {"id": name, "reason": f"classes overlap in {pixels} pixel{'s' * (pixels > 1)}"}
        for name, pixels in over
    ]
    return Source(
        rows=rows,
        classes=ORGANS if multilabel else (BACKGROUND, *ORGANS),
        kind=SLICES if stack > 1 else IMAGE,
        in_chans=stack,
        test_fraction=0.04,
        notes=tuple(notes),
        facts=DataFacts(masks=MASKS[multilabel], stack=stack),
        found={"odd": (WARNING, overlaps), "rows": (level, unlisted)},
    )


def _mask(runs: _Runs, size: Size, *, multilabel: bool) -> tv_tensors.Mask:
    """Fill the runs; where a pixel has one class, the later one is kept."""
    found = torch.zeros((len(ORGANS), *size) if multilabel else size, dtype=torch.uint8)
    for organ, of_organ in runs:
        inside = torch.from_numpy(rle.filled(of_organ, *size))
        if multilabel:
            found[organ] = inside
        else:
            found[inside] = organ + 1
    return tv_tensors.Mask(found)


def _files(root: Path, faults: Faults) -> _Files:
    """List the files of all slices below ``root``."""
    found: dict[tuple[str, str], dict[int, list[Path]]] = {}
    for folder in sorted((root / "train").glob("case*/case*_day*/scans")):
        day = DAY.fullmatch(folder.parent.name)
        if day is None or day[1] != folder.parent.parent.name:
            faults.stranger(folder)
            continue
        numbers: dict[int, list[Path]] = {}
        for name in sorted(os.listdir(folder)):  # noqa: PTH208  # names alone, without a stat
            if (match := FILE.fullmatch(name)) is not None:
                numbers.setdefault(int(match[1]), []).append(folder / name)
            elif not name.startswith("."):
                faults.stranger(folder / name)
        found[day[1], day[2]] = numbers
    return found


def _missing(root: Path, name: str) -> Path:
    """Say where the file of a slice is missing."""
    day, _, number = name.partition("_slice_")
    return root / "train" / day.partition("_")[0] / day / "scans" / f"slice_{number}_*.png"


class _Slice(NamedTuple):
    """What the table says of a slice."""

    case: str
    day: str
    number: int
    files: Sequence[Path]  # one, unless something is wrong
    size: Size  # by the file's name
    runs: _Runs
    listed: frozenset[str]  # the organs that have a row, with run lengths or without
    faults: tuple[Fault, ...]


def _slices(table: Path, files: _Files, faults: Faults) -> dict[str, _Slice]:
    """Read the slices by their ids, in the order of case, day and number."""
    rows: dict[str, list[tuple[int, str, str]]] = {}
    keys: dict[str, tuple[int, int, int]] = {}
    for line, (name, organ, text) in read_rows(
        table, ("id", "class", "segmentation"), faults.report
    ):
        match = _ID.fullmatch(name)
        if match is None:
            why = f"id {name!r} is not like case101_day20_slice_0078. Correct or remove it."
            faults.report(f"{table}: line {line}", why)
            continue
        keys[name] = (int(match[1][4:]), int(match[2]), int(match[3]))
        rows.setdefault(name, []).append((line, organ, text))
    if not rows:
        raise UserError(f"{table} has no row that can be read. Restore it.")
    names = sorted(rows, key=lambda name: (keys[name], name))
    return {name: _slice(table, name, rows[name], files) for name in names}


def _slice(table: Path, name: str, rows: Sequence[tuple[int, str, str]], files: _Files) -> _Slice:
    """Read the rows of a slice, with all that is wrong with them."""
    day, _, number = name.partition("_slice_")
    case, _, day = day.partition("_day")
    given = files.get((case, day), {}).get(int(number), ())
    size = stated_size(given[0].name) if given else (0, 0)
    found = []
    if len(given) > 1:
        message = f"{name} has {len(given)} scans: {some([str(path) for path in given])}"
        found.append(Fault(name, message))
    runs: list[tuple[int, rle.Runs]] = []
    lines: dict[str, int] = {}
    for line, organ, text in rows:
        why = ""
        if organ not in ORGANS:
            why = f"class {organ!r} is none of {', '.join(ORGANS)}"
        elif organ in lines:
            why = f"line {lines[organ]} has this mask already"
        else:
            lines[organ] = line
            try:
                if given and (parsed := rle.parse(text, *size)).size:
                    runs.append((ORGANS.index(organ), parsed))
            except (ValueError, OverflowError) as error:
                why = str(error)
        if why:
            message = f"{table}: line {line} ({name}, {organ}): {why}"
            found.append(Fault(f"{table}: line {line}", message))
    runs.sort(key=lambda each: each[0])
    return _Slice(case, day, int(number), given, size, runs, frozenset(lines), tuple(found))


def _unlisted(slices: Mapping[str, _Slice]) -> tuple[str, list[dict[str, str]]]:
    """Find the slices that lack a row for an organ, where the table has rows for all of them.

    That is its pattern if a slice with organs has rows without run lengths for others, or if nine
    of ten slices have a row for every organ. Only the first is certain.

    Returns the level of the finding, and its items.
    """
    # what is wrong with others is reported of them
    sound = {name: one for name, one in slices.items() if one.files and not one.faults}
    organs = frozenset[str]().union(*(one.listed for one in sound.values()))
    lacking = [name for name, one in sound.items() if one.listed < organs]
    certain = any(0 < len(one.runs) < len(one.listed) for one in sound.values())
    if not certain and len(lacking) > _FEW * len(sound):
        lacking = []
    items = []
    for name in lacking:
        missing = [organ for organ in ORGANS if organ in organs - sound[name].listed]
        items.append({"id": name, "reason": f"{name}: no row for {' and '.join(missing)}"})
    return FALSIFIES if certain else WARNING, items


def _splits(path: Path, slices: Mapping[str, _Slice], faults: Faults) -> dict[str, str]:
    """Read which slices are in which split."""
    of: dict[str, list[str]] = {}
    for name, one in slices.items():
        of.setdefault(one.case, []).append(name)
        of[name] = [name]
    given: dict[str, tuple[str, int]] = {}
    found: dict[str, str] = {}
    for line, (name, split) in read_rows(path, ("case|id", "split"), faults.report):
        why = ""
        before = given.setdefault(name, (split, line))
        if split not in SPLITS:
            why = f"split {split!r} is none of {', '.join(SPLITS)}"
        elif name not in of:
            why = f"{name!r} is no case and no id of train.csv"
        elif before[0] != split:
            why = f"{name!r} is in {split}, but in {before[0]} by line {before[1]}"
        if why:
            faults.report(f"{path}: line {line}", f"{why}. Correct or remove it.")
            continue
        for each in of[name]:
            found.setdefault(each, split)
    if left := [name for name in slices if name not in found]:
        faults.report(
            path, f"it has no split for {len(left)} slices: {some(left, 3)}. Add their rows."
        )
    if "train" not in found.values():
        raise UserError(f"{path} has no slices in train. Add some.")
    return found
