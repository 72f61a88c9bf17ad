# SPDX-License-Identifier: Apache-2.0
"""A folder of image files, one folder a class, with or without folders for the splits above."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from keymix.data.decode import open_image
from keymix.data.regular import regular
from keymix.data.sources.base import Faults, Source, Table, check_count, head_digest, some
from keymix.data.specs import DataSpec, existing_folder
from keymix.data.streams import IntArray
from keymix.data.targets import ClassTargets, Targets
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="folder",
        argument="PATH",
        summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with image files",
        on_disk=True,
    ),
)

SUFFIXES = frozenset(
    ".bmp .gif .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()  # noqa: SIM905
)
_VALIDATION = ("val", "validation", "valid")


def open_source(argument: str, faults: Faults) -> Source:
    """Open ``PATH/<class>/`` or ``PATH/{train,val,test}/<class>/``."""
    root = existing_folder("folder", argument)
    inside = folders(root)
    if "train" not in inside:
        if inside and set(inside) <= {"test", *_VALIDATION}:
            raise UserError(f"{root} has {' and '.join(inside)}, but no folder train. Add it.")
        classes, train, notes = training(root, root, faults)
        return Source(classes=tuple(classes), train=train, notes=notes)
    held_out = [name for name in _VALIDATION if name in inside]
    if len(held_out) > 1:
        raise UserError(f"{root} has both {' and '.join(held_out)}. Keep one of them.")
    left = sorted(set(inside) - {"train", "test", *held_out})
    classes, train, notes = training(root, root / "train", faults)
    if left:
        notes = (f"folders left out: {some(left)}", *notes)
    others = {
        name: class_table(root, root / name, classes, faults)
        for name in (*held_out, "test")
        if name in inside
    }
    return Source(
        classes=tuple(classes),
        train=train,
        val=others.get(held_out[0]) if held_out else None,
        test=others.get("test"),
        notes=notes,
    )


def training(root: Path, folder: Path, faults: Faults) -> tuple[list[str], Table, tuple[str, ...]]:
    """Find the classes and the training images below ``folder``.

    Returns the classes, the images, and notes.
    """
    classes = folders(folder)
    if not classes:
        raise UserError(
            f"{folder} has no folders inside. Lay the images as {folder.name}/<class>/<image>."
        )
    if len(classes) == 1:
        faults.tell(
            "one class",
            folder,
            f"{folder} has one class only ({classes[0]}); at least 2 are needed, a folder each.",
        )
    loose = sum(is_image(file.name) for file in folder.iterdir() if file.is_file())
    notes = (f"{loose} images beside the class folders are left out",) if loose else ()
    return classes, class_table(root, folder, classes, faults), notes


def class_table(root: Path, folder: Path, classes: list[str], faults: Faults) -> Table:
    """List the images of ``folder``'s class folders.

    A class that is not among ``classes`` is a fault; where faults are collected, it is added.
    """
    files: list[str] = []
    labels: list[int] = []
    for name in folders(folder):
        if name not in classes:
            faults.tell(
                "unknown class",
                folder / name,
                f"{folder / name}: class {name!r} is not in train. "
                "Add training images of it, or remove the folder.",
            )
            classes.append(name)
        found = images_below(folder / name, faults)
        if not found:
            faults.tell(
                "empty class",
                folder / name,
                f"{folder / name}: class {name!r} is empty. Add images, or remove the folder.",
            )
        files += [os.path.relpath(file, root) for file in found]
        labels += [classes.index(name)] * len(found)
    if not files:
        raise UserError(f"{folder} has no images in class folders. Add some, or remove the folder.")
    return Files(root, files, np.asarray(labels, dtype=np.int64))


def folders(path: Path) -> list[str]:
    """List the visible folders inside, sorted."""
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def is_image(name: str) -> bool:
    """Tell by its name whether a file is an image and not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def images_below(folder: Path, faults: Faults) -> list[str]:
    """List the image files of a folder and those below it, sorted by path, one stat a folder."""
    found = []
    for where, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(where, name)  # noqa: PTH118  # a million Paths would take a GB
            if is_image(name):
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
        inside = rest if split in ("train", "test", *_VALIDATION) else path
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
