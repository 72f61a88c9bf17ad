# SPDX-License-Identifier: Apache-2.0
"""A folder of image files, one folder a class, with or without folders for the splits above."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from keymix.data.sources.base import Source, Table, head_digest, some
from keymix.data.specs import existing_path
from keymix.data.streams import IntArray
from keymix.errors import UserError

SUFFIXES = frozenset(
    ".bmp .gif .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()  # noqa: SIM905
)
_VALIDATION = ("val", "validation", "valid")


def open_source(argument: str) -> Source:
    """Open ``PATH/<class>/`` or ``PATH/{train,val,test}/<class>/``.

    Raises:
        UserError: If there is one class only, a class without images, or a class in another split
            that train does not have.
    """
    root = existing_path("folder", argument)
    if not root.is_dir():
        raise UserError(
            f"data folder:{argument}: {root} is a file. Give the folder of the classes."
        )
    inside = _folders(root)
    if "train" not in inside:
        if inside and set(inside) <= {"test", *_VALIDATION}:
            raise UserError(f"{root} has {' and '.join(inside)}, but no folder train. Add it.")
        return _flat(root, root, ())
    held_out = [name for name in _VALIDATION if name in inside]
    if len(held_out) > 1:
        raise UserError(f"{root} has both {' and '.join(held_out)}. Keep one of them.")
    known = {"train", "test", *held_out}
    left = sorted(set(inside) - known)
    notes = (f"folders left out: {some(left)}",) if left else ()
    source = _flat(root, root / "train", notes)
    others = {
        name: _table(root, root / name, source.classes)
        for name in (*held_out, "test")
        if name in inside
    }
    return Source(
        classes=source.classes,
        train=source.train,
        val=others.get(held_out[0]) if held_out else None,
        test=others.get("test"),
        notes=notes,
    )


def _flat(root: Path, folder: Path, notes: tuple[str, ...]) -> Source:
    classes = tuple(_folders(folder))
    if not classes:
        raise UserError(
            f"{folder} has no folders inside. Lay the images as {folder.name}/<class>/<image>."
        )
    if len(classes) == 1:
        raise UserError(
            f"{folder} has one class only ({classes[0]}); at least 2 are needed, a folder each."
        )
    loose = [file for file in folder.iterdir() if _is_image(file)]
    if loose:
        notes += (f"{len(loose)} images beside the class folders are left out",)
    return Source(classes=classes, train=_table(root, folder, classes), notes=notes)


def _table(root: Path, folder: Path, classes: Sequence[str]) -> Table:
    files: list[Path] = []
    labels: list[int] = []
    for name in _folders(folder):
        if name not in classes:
            raise UserError(
                f"{folder / name}: class {name!r} is not in train. "
                "Add training images of it, or remove the folder."
            )
        found = sorted(file for file in (folder / name).rglob("*") if _is_image(file))
        if not found:
            raise UserError(
                f"{folder / name}: class {name!r} is empty. Add images, or remove the folder."
            )
        files += found
        labels += [classes.index(name)] * len(found)
    if not files:
        raise UserError(f"{folder} has no class folders. Add them, or remove the folder.")
    return _Files(root, files, np.asarray(labels, dtype=np.int64))


def _folders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


class _Files(Table):
    def __init__(self, root: Path, files: Sequence[Path], labels: IntArray) -> None:
        self.labels = labels
        self._root = root
        self._files = files

    def name(self, i: int) -> str:
        return str(self._files[i])

    def open(self, i: int) -> Image.Image:
        return Image.open(self._files[i])

    def digest(self, i: int) -> bytes:
        file = self._files[i]
        with file.open("rb") as stream:
            head = stream.read(1 << 16)
        return head_digest(
            file.stat().st_size, file.relative_to(self._root).as_posix().encode() + head
        )

    def select(self, rows: IntArray) -> Table:
        return _Files(self._root, [self._files[i] for i in rows], self.labels[rows])
