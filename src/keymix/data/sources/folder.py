# SPDX-License-Identifier: Apache-2.0
"""A folder of image files, one folder per class, with or without folders for the splits above."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keymix.data.decode import Encoded
from keymix.data.files import (
    SPLIT_NAMES,
    existing_folder,
    folders,
    is_hidden,
    is_image,
    split_named,
)
from keymix.data.sample import Faults, Row, Source, some
from keymix.data.specs import source
from keymix.data.streams import IntArray
from keymix.errors import UserError


@source(
    "folder",
    argument="PATH",
    summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with image files",
    settings=("white_level",),
    on_disk=True,
)
def open_folder(argument: str, faults: Faults) -> Source:
    """Open ``PATH/<class>/`` or ``PATH/{train,val,test}/<class>/``."""
    root = existing_folder("folder", argument)
    parts, notes = split_folders(root)
    classes, loose = image_classes(parts["train"], faults)
    found = {split: labelled(root, at, classes, faults) for split, at in parts.items()}
    hidden = (f"{faults.hidden} images in hidden folders are left out",) if faults.hidden else ()
    return Source(
        rows=file_rows(root, found), classes=tuple(classes), notes=(*notes, *loose, *hidden)
    )


def split_folders(root: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Find the folders of train, val and test by name, and note those left out.

    Without a folder for train, all of ``root`` is train.
    """
    inside = folders(root)
    found: dict[str, list[str]] = {split: [] for split in SPLIT_NAMES}
    for name in inside:
        found.get(split_named(name), []).append(name)
    for names in found.values():
        if len(names) > 1:
            raise UserError(f"{root} has both {' and '.join(names)}. Keep one of them.")
    parts = {split: root / name for split, names in found.items() for name in names}
    left = [name for name in inside if not split_named(name)]
    if "train" in parts:
        return parts, (f"folders left out: {some(left)}",) if left else ()
    if parts and not left:
        raise UserError(f"{root} has {' and '.join(inside)}, but no folder train. Add it.")
    below = {tuple(folders(root / name)) for name in inside}
    if len(inside) > 1 and len(below) == 1 and len(classes := below.pop()) > 1:
        raise UserError(
            f"{root}: {some(inside)} all hold the same folders ({some(classes)}), as splits do, "
            "not classes. Call them train, val and test, or give one of them."
        )
    return {"train": root}, ()


def classes_in(folder: Path, faults: Faults, remedy: str) -> list[str]:
    """List the class folders of train: one alone is a fault, none is an error that says how."""
    classes = folders(folder)
    if not classes:
        raise UserError(f"{folder} has no folders inside. {remedy}")
    if len(classes) == 1:
        text = f"it has one class only ({classes[0]}); at least 2 are needed, a folder each."
        faults.report(folder, text)
    return classes


def labelled(
    root: Path,
    folder: Path,
    classes: list[str],
    faults: Faults,
    *,
    find: Callable[[Path, Faults], Sequence[str | Path]] | None = None,
    holds: str = "images",
) -> tuple[list[str], list[int]]:
    """List the files of ``folder``'s class folders below ``root``, with their class numbers.

    A class that is not among ``classes`` is a fault; where faults are collected, it is added.
    ``find`` lists the files of a class, ``holds`` is what they are called.
    """
    files: list[str] = []
    labels: list[int] = []
    for name in folders(folder):
        if name not in classes:
            text = f"class {name!r} is not in train. Add it there, or remove the folder."
            faults.report(folder / name, text)
            classes.append(name)
        found = (find or images_below)(folder / name, faults)
        if not found:
            text = f"class {name!r} has no {holds}. Add some, or remove the folder."
            faults.report(folder / name, text)
        files += [os.path.relpath(file, root) for file in found]
        labels += [classes.index(name)] * len(found)
    if not files:
        raise UserError(f"{folder} has no {holds} in class folders. Add some, or remove it.")
    return files, labels


def image_classes(folder: Path, faults: Faults) -> tuple[list[str], tuple[str, ...]]:
    """List the class folders of train, and note the images outside of them."""
    classes = classes_in(folder, faults, f"Arrange the images as {folder.name}/<class>/<image>.")
    loose = sum(is_image(file.name) for file in folder.iterdir() if file.is_file())
    return classes, (f"{loose} images outside the class folders are left out",) if loose else ()


def images_below(folder: Path, faults: Faults) -> list[str]:
    """List the image files of a folder and those below it, sorted by path, one stat per folder.

    Images in hidden folders are left out and counted.
    """
    found = []
    for where, _, names in os.walk(folder):
        hidden = any(map(is_hidden, Path(where).relative_to(folder).parts))
        for name in names:
            file = os.path.join(where, name)  # noqa: PTH118  # a million Paths would take a GB
            if hidden:
                faults.hidden += is_image(name)
            elif is_image(name):
                found.append(file)
            elif not name.startswith("."):
                faults.stranger(file)
    return sorted(found, key=lambda file: file.split(os.sep))  # noqa: PTH206


class FileRows(Sequence[Row]):
    """Image files below a root, built into rows when they are asked for."""

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        targets: Sequence[Any],
        splits: Sequence[str],
        groups: Sequence[str] = (),
    ) -> None:
        self._root, self._files, self._targets = root, files, targets
        self._before = str(root / "_")[:-1]  # a million Paths would take seconds
        self._splits, self._groups = splits, groups

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: Any) -> Any:
        """Build a row; its name is class and file, without suffix and a split's folder."""
        path = self._before + self._files[i]
        key = self._files[i].replace(os.sep, "/")
        split, _, rest = key.partition("/")
        return Row(
            id=path,
            image=Encoded(path, path, key),
            target=self._targets[i],
            split=self._splits[i],
            group=self._groups[i] if self._groups else "",
            name=(rest if split_named(split) else key).rpartition(".")[0],
        )

    def select(self, index: IntArray) -> FileRows:
        """Keep some rows."""
        columns = self._files, self._targets, self._splits, self._groups
        at = index.tolist()
        return FileRows(self._root, *([each[i] for i in at] if each else () for each in columns))


def file_rows(root: Path, found: Mapping[str, tuple[Sequence[str], Sequence[int]]]) -> FileRows:
    """Make rows of the files of each split, with their class numbers."""
    return FileRows(
        root,
        [file for files, _ in found.values() for file in files],
        [label for _, labels in found.values() for label in labels],
        [split for split, (files, _) in found.items() for _ in files],
    )
