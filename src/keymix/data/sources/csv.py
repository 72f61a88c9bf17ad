# SPDX-License-Identifier: Apache-2.0
"""Image files with a class each in a table: ``labels.csv``, or Hugging Face's ``metadata.csv``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from keymix.data.class_names import read_class_names
from keymix.data.files import existing_path, folders, read_rows, split_named
from keymix.data.sample import SPLITS, Faults, Source, some
from keymix.data.sources.folder import FileRows
from keymix.data.specs import TABLES, source
from keymix.errors import UserError


class _Row(NamedTuple):
    file: str  # below the root
    label: str
    split: str
    group: str  # empty for none
    place: str  # table and line


@source(
    "csv",
    argument="PATH",
    summary="a CSV file of images and classes (file, label; optionally split, group), or a "
    "folder with labels.csv or metadata.csv",
    settings=("white_level",),
    on_disk=True,
)
def open_csv(argument: str, faults: Faults) -> Source:
    """Open a CSV file, or a folder with one or with one in each of its splits' folders.

    ``classes.txt`` next to it gives the order of the classes, or the names of numbers.
    """
    path = existing_path("csv", argument)
    root = path if path.is_dir() else path.parent
    rows = [
        row for table, split in _tables(path).items() for row in _rows(root, table, split, faults)
    ]
    train = {row.label for row in rows if row.split == "train"}
    if len(train) < 2:
        faults.report(path, f"its rows of train have {len(train)} classes; 2 or more are needed.")
    names, number = _classes(root, train)
    for row in rows:
        if row.label not in number:
            text = f"label {row.label!r} is no class of train. Correct or remove it."
            faults.report(row.place, text)
    if not any(row.split == "train" for row in rows):
        raise UserError(f"data csv:{argument}: no row is of train. Add some.")
    rows.sort(key=lambda row: SPLITS.index(row.split))
    grouped = any(row.group for row in rows)
    return Source(
        rows=FileRows(
            root,
            [row.file for row in rows],
            [number.get(row.label, -1) for row in rows],
            [row.split for row in rows],
            [row.group or row.file for row in rows] if grouped else (),
        ),
        classes=names,
    )


def _tables(path: Path) -> dict[Path, str]:
    """Find the tables, each with the split that its folder names; empty for that of its rows."""
    if path.is_file():
        return {path: ""}
    splits = [(path / name, split_named(name)) for name in folders(path) if split_named(name)]
    for places in [(path, "")], splits:
        found = {
            place / name: split
            for place, split in places
            for name in TABLES
            if (place / name).is_file()
        }
        if len(found) > len(places):
            raise UserError(f"{path} has {some([str(each) for each in found])}. Give one of them.")
        if found:
            return found
    raise UserError(f"{path} has neither {' nor '.join(TABLES)}. Name the CSV file: csv:PATH.")


def _rows(root: Path, table: Path, split: str, faults: Faults) -> list[_Row]:
    """Read the rows of a table that can be used; without a split they are of train."""
    found = []
    columns = "file|file_name|filename|image", "label|class"
    for line, (file, label, wanted, group) in read_rows(
        table, columns, faults.report, optional=("split", "group")
    ):
        place, image = f"{table}: line {line}", table.parent / file.replace("\\", "/")
        own = split_named(wanted) if wanted else split or "train"
        if not label or not own:
            why = f"split {wanted!r} is not train, val or test" if label else "it has no label"
            faults.report(place, f"{why}. Correct or remove the row.")
        elif not image.is_file():
            faults.report(place, f"there is no {str(image)!r}. Add it.")
        else:
            found.append(_Row(os.path.relpath(image, root), label, own, group, place))
    return found


def _classes(root: Path, labels: set[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Name the classes, and number what the rows call them."""
    if (root / "classes.txt").exists():
        given = read_class_names(root / "classes.txt")
        values = given.values or range(len(given.names))
        number = {str(value): i for i, value in enumerate(values)}
        return given.names, number | {name: i for i, name in enumerate(given.names)}
    whole = all(label.isdecimal() for label in labels)
    names = sorted(labels, key=int) if whole else sorted(labels)
    return tuple(names), {name: i for i, name in enumerate(names)}
