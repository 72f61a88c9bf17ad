# SPDX-License-Identifier: Apache-2.0
"""The UW-Madison GI Tract set as it is: run lengths in a CSV, 16-bit slices in folders of cases.

https://www.kaggle.com/competitions/uw-madison-gi-tract-image-segmentation. A slice's file is
``train/case101/case101_day20/scans/slice_0078_266_266_1.50_1.50.png``: number of the slice, width
and height in pixels (columns, then rows), width and height of a pixel in millimetres.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from keymix.data.files import existing_path, read_rows
from keymix.data.kinds import BACKGROUND, MaskKind
from keymix.data.segmentation import rle
from keymix.data.segmentation.slices import DAY, FILE, Slice, Slices, SliceSet, size_of, spacing_of
from keymix.data.segmentation.table import ScanSource, Unlisted, check_choices, report_shared_cases
from keymix.data.sources.base import Fault, Faults, some
from keymix.data.specs import DataSpec
from keymix.data.streams import IntArray
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="uwgi",
        argument="PATH",
        summary="UW-Madison GI Tract: PATH/train.csv with run lengths and 16-bit slices under "
        "PATH/train/case*/; masks of three organs",
        kind="slices",
        task="segmentation",
        target="mask",
        on_disk=True,
    ),
)

ORGANS = ("large_bowel", "small_bowel", "stomach")
_ID = re.compile(r"(case[0-9]+)_day([0-9]+)_slice_([0-9]{4}|[1-9][0-9]{4,})")
_SPLITS = ("train", "val", "test")
_FEW = 0.1  # of the slices may lack a row where no row says that an organ is absent


def open_source(
    argument: str,
    faults: Faults,
    *,
    masks: str | None = None,
    stack: int | None = None,
    split_by: str | None = None,
) -> ScanSource:
    """Open ``PATH/train.csv`` and ``PATH/train/``, and ``PATH/splits.csv`` if it is there.

    A slice is what ``train.csv`` has rows of; a slice without run lengths has no organ. Slices
    without any row are left out, but may be a neighbour in a stack. ``splits.csv`` gives a split
    (``train``, ``val``, ``test``) to each ``case`` or each ``id``.
    """
    check_choices(masks, split_by)
    channels = 1 if stack is None else stack
    if channels < 1 or channels % 2 == 0:
        raise UserError(f"data.stack = {stack}: it must be an odd number of slices, such as 3.")
    root = existing_path("uwgi", argument)
    if not (root / "train.csv").is_file() or not (root / "train").is_dir():
        raise UserError(
            f"data uwgi:{argument}: {root} is not a folder with train.csv and train/. Give the "
            "folder that the competition's archive was unpacked into."
        )
    files = _files(root, faults)
    slices = _slices(root, files, faults)
    multilabel = masks == "multilabel"
    whole = Slices(
        SliceSet(root, slices, files, len(ORGANS)), multilabel=multilabel, channels=channels
    )
    extra = sum(map(len, files.values())) - sum(s.file is not None for s in slices)
    notes = (f"{extra} slices without a row in train.csv left out",) if extra else ()
    tables = {"train": whole}
    if (root / "splits.csv").exists():
        pinned = _pinned(root / "splits.csv", slices, faults)
        tables = {name: whole.select(rows) for name, rows in pinned.items() if len(rows)}
        if "train" not in tables:
            raise UserError(f"{root / 'splits.csv'} has no slices in train. Add some.")
        if split_by != "slice":
            report_shared_cases(tables, faults)
    return ScanSource(
        classes=ORGANS if multilabel else (BACKGROUND, *ORGANS),
        train=tables["train"],
        val=tables.get("val"),
        test=tables.get("test"),
        in_chans=channels,
        notes=notes,
        masks=MaskKind(multilabel=multilabel, background=None if multilabel else 0),
        unlisted=_unlisted(slices),
    )


def _files(root: Path, faults: Faults) -> dict[tuple[str, str], dict[int, list[str]]]:
    """List the files of all slices below ``root``, by case and day, by number."""
    found: dict[tuple[str, str], dict[int, list[str]]] = {}
    for folder in sorted((root / "train").glob("case*/case*_day*/scans")):
        day = DAY.fullmatch(folder.parent.name)
        if day is None or day[1] != folder.parent.parent.name:
            faults.stranger(folder)
            continue
        numbers: dict[int, list[str]] = {}
        for name in sorted(os.listdir(folder)):  # noqa: PTH208  # names alone, without a stat
            match = FILE.fullmatch(name)
            if match is not None:
                relative = (folder / name).relative_to(root).as_posix()
                numbers.setdefault(int(match[1]), []).append(relative)
            elif not name.startswith("."):
                faults.stranger(folder / name)
        found[day[1], day[2]] = numbers
    return found


def _slices(
    root: Path, files: Mapping[tuple[str, str], Mapping[int, list[str]]], faults: Faults
) -> list[Slice]:
    """Make a slice of the rows of each id, in the order of case, day and number."""
    table = root / "train.csv"
    rows: dict[str, list[tuple[int, str, str]]] = {}
    keys: dict[str, tuple[int, int, int]] = {}
    for line, (name, organ, text) in read_rows(
        table, ("id", "class", "segmentation"), faults.report
    ):
        match = _ID.fullmatch(name)
        if match is None:
            faults.report(
                "bad row",
                f"{table}:{line}",
                f"{table}: line {line}: id {name!r} is not like case101_day20_slice_0078. Correct "
                "or remove it.",
            )
            continue
        keys[name] = (int(match[1][4:]), int(match[2]), int(match[3]))
        rows.setdefault(name, []).append((line, organ, text))
    if not rows:
        raise UserError(f"{table} has no row that can be read. Restore it.")
    return [
        _slice(table, name, rows[name], files)
        for name in sorted(rows, key=lambda each: (keys[each], each))
    ]


def _slice(
    table: Path,
    name: str,
    rows: list[tuple[int, str, str]],
    files: Mapping[tuple[str, str], Mapping[int, list[str]]],
) -> Slice:
    """Make a slice, with all that is wrong with its rows and its file's name."""
    match = _ID.fullmatch(name)
    assert match is not None
    case, day, number = match[1], match[2], int(match[3])
    given = files.get((case, day), {}).get(number, [])
    found: list[Fault] = []
    size = size_of(given[0]) if given else (0, 0)
    if not given:
        scans = f"train/{case}/{case}_day{day}/scans/slice_{match[3]}_*.png"
        message = f"{table}: line {rows[0][0]}: the scan of {name} is missing: {scans}"
        found.append(Fault("missing", message, name))
    if len(given) > 1:
        message = f"{name} has {len(given)} scans: {some(given)}"
        found.append(Fault("bad row", message, name))
    runs: list[tuple[int, rle.Runs]] = []
    lines: dict[str, int] = {}
    for line, organ, text in rows:
        place = f"{table}: line {line} ({name}, {organ})"
        culprit = f"{table}:{line}"
        if organ not in ORGANS:
            message = f"{place}: class {organ!r} is none of {', '.join(ORGANS)}"
            found.append(Fault("bad row", message, culprit))
            continue
        if organ in lines:
            message = f"{place}: line {lines[organ]} has this mask already"
            found.append(Fault("bad row", message, culprit))
            continue
        lines[organ] = line
        if not given:
            continue
        try:
            parsed = rle.parse(text, *size)
        except (ValueError, OverflowError) as error:
            found.append(Fault("bad annotation", f"{place}: {error}", culprit))
            continue
        if parsed.shape[1]:
            runs.append((ORGANS.index(organ), parsed))
    return Slice(
        id=name,
        case=case,
        day=day,
        number=number,
        file=given[0] if given else None,
        size=size,
        spacing=spacing_of(given[0]) if given else None,
        runs=tuple(sorted(runs, key=lambda each: each[0])),
        faults=tuple(found),
        listed=frozenset(lines),
    )


def _unlisted(slices: Sequence[Slice]) -> tuple[Unlisted, ...]:
    """Find the slices that lack a row for an organ, where the table has rows for all of them.

    That is its pattern if a slice with organs has rows without run lengths for others, or if nine
    of ten slices have a row for every organ.
    """
    sound = [
        one for one in slices if not one.faults
    ]  # what is wrong with others is reported of them
    organs = frozenset[str]().union(*(one.listed for one in sound))
    lacking = [one for one in sound if one.listed < organs]
    certain = any(0 < len(one.runs) < len(one.listed) for one in sound)
    if not certain and len(lacking) > _FEW * len(sound):
        return ()
    return tuple(
        Unlisted(
            id=one.id,
            classes=tuple(organ for organ in ORGANS if organ in organs - one.listed),
            certain=certain,
        )
        for one in lacking
    )


def _pinned(path: Path, slices: list[Slice], faults: Faults) -> dict[str, IntArray]:
    """Read which slices are in which split: rows of positions, by split."""
    of: dict[str, list[int]] = {}
    for i, one in enumerate(slices):
        of.setdefault(one.case, []).append(i)
        of[one.id] = [i]
    given: dict[str, tuple[str, int]] = {}
    split_of: dict[int, str] = {}
    for line, (name, split) in read_rows(path, ("case|id", "split"), faults.report):
        why = ""
        before = given.setdefault(name, (split, line))
        if split not in _SPLITS:
            why = f"split {split!r} is none of {', '.join(_SPLITS)}"
        elif name not in of:
            why = f"{name!r} is no case and no id of train.csv"
        elif before[0] != split:
            why = f"{name!r} is in {split}, but in {before[0]} by line {before[1]}"
        if why:
            message = f"{path}: line {line}: {why}. Correct or remove it."
            faults.report("bad row", f"{path}:{line}", message)
            continue
        for i in of[name]:
            split_of.setdefault(i, split)
    left = [one.id for i, one in enumerate(slices) if i not in split_of]
    if left:
        message = f"{path} has no split for {len(left)} slices: {some(left, 3)}. Add their rows."
        faults.report("bad row", path, message)
    return {
        name: np.array(
            [i for i, split in sorted(split_of.items()) if split == name], dtype=np.int64
        )
        for name in _SPLITS
    }
