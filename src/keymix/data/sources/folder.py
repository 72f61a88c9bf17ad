# SPDX-License-Identifier: Apache-2.0
"""A folder of image files, one folder per class, with or without folders for the splits above."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from keymix.data.decode import open_image
from keymix.data.files import (
    SPLITS,
    existing_folder,
    folders,
    is_hidden,
    is_image,
    regular,
    split_named,
)
from keymix.data.sources.base import Faults, Source, Table, check_count, head_digest, some
from keymix.data.specs import DataSpec
from keymix.data.streams import IntArray
from keymix.data.targets import ClassTargets, Targets
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="folder",
        argument="PATH",
        summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with image files",
        settings=("white_level",),
        on_disk=True,
    ),
)


def open_source(argument: str, faults: Faults) -> Source:
    """Open ``PATH/<class>/`` or ``PATH/{train,val,test}/<class>/``."""
    root = existing_folder("folder", argument)
    parts, notes = split_folders(root)
    classes, train, left = training(root, parts["train"], faults)
    tables = {
        name: class_table(root, folder, classes, faults)
        for name, folder in parts.items()
        if name != "train"
    }
    if faults.hidden:
        left = (*left, f"{faults.hidden} images in hidden folders are left out")
    return Source(
        classes=tuple(classes),
        train=train,
        val=tables.get("val"),
        test=tables.get("test"),
        notes=(*notes, *left),
    )


def split_folders(root: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Find the folders of train, val and test by name, and note those left out.

    Without a folder for train, all of ``root`` is train.
    """
    inside = folders(root)
    found: dict[str, list[str]] = {split: [] for split in SPLITS}
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
        faults.report(
            "one class",
            folder,
            f"{folder} has one class only ({classes[0]}); at least 2 are needed, a folder each.",
        )
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
            faults.report("unknown class", folder / name, f"{folder / name}: {text}")
            classes.append(name)
        found = (find or images_below)(folder / name, faults)
        if not found:
            text = f"class {name!r} has no {holds}. Add some, or remove the folder."
            faults.report("empty class", folder / name, f"{folder / name}: {text}")
        files += [os.path.relpath(file, root) for file in found]
        labels += [classes.index(name)] * len(found)
    if not files:
        raise UserError(f"{folder} has no {holds} in class folders. Add some, or remove it.")
    return files, labels


def training(root: Path, folder: Path, faults: Faults) -> tuple[list[str], Table, tuple[str, ...]]:
    """Find the classes and the training images below ``folder``; paths are below ``root``.

    Returns the classes, the images, and notes.
    """
    remedy = f"Arrange the images as {folder.name}/<class>/<image>."
    classes = classes_in(folder, faults, remedy)
    loose = sum(is_image(file.name) for file in folder.iterdir() if file.is_file())
    notes = (f"{loose} images outside the class folders are left out",) if loose else ()
    return classes, class_table(root, folder, classes, faults), notes


def class_table(root: Path, folder: Path, classes: list[str], faults: Faults) -> Table:
    """List the images of ``folder``'s class folders."""
    files, labels = labelled(root, folder, classes, faults)
    return Files(root, files, np.asarray(labels, dtype=np.int64))


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


class Files(Table):
    """Image files."""

    def __init__(self, root: Path, files: Sequence[str], targets: IntArray | Targets) -> None:
        self._targets = ClassTargets(targets) if isinstance(targets, np.ndarray) else targets
        self.labels = self._targets.strata
        self._root = root
        self._files = files
        check_count(str(root), len(files), self._targets)

    @property
    def targets(self) -> Targets:
        """What a model is to learn of the images."""
        return self._targets

    def name(self, i: int) -> str:
        """Give the file's path."""
        return str(self._root / self._files[i])

    def numbered(self, i: int) -> str:
        """Give class and file, without suffix and without the folder of a split."""
        path = self._files[i].replace(os.sep, "/")
        split, _, rest = path.partition("/")
        inside = rest if split_named(split) else path
        return inside.rpartition(".")[0]

    def open(self, i: int) -> Image.Image:
        """Open the file."""
        return open_image(self._root / self._files[i])

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash length, path below the root and, with ``content``, the first 64 KiB."""
        file = self._root / self._files[i]
        head = b""
        if content:
            with regular(file).open("rb") as stream:
                head = stream.read(1 << 16)
        return head_digest(file.stat().st_size, Path(self._files[i]).as_posix().encode() + head)

    def select(self, rows: IntArray) -> Table:
        """Keep the files of ``rows``."""
        return Files(self._root, [self._files[i] for i in rows], self._targets.select(rows))
