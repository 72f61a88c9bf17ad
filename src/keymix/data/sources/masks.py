# SPDX-License-Identifier: Apache-2.0
"""A folder of images and one of PNG masks, with or without folders for the splits above."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.decode import DAMAGE, SIXTEEN_BIT, Size, convert, open_image, reason, to_array
from keymix.data.files import existing_path, folders, is_image, read_rows, regular
from keymix.data.kinds import BACKGROUND, IGNORE, MaskKind
from keymix.data.segmentation.table import (
    Pixels,
    ScanSource,
    ScanTable,
    Seen,
    check_choices,
    report_shared_cases,
)
from keymix.data.sources.base import Fault, Faults, head_digest, refuse, some
from keymix.data.specs import MASKS, DataSpec
from keymix.data.splits import sample
from keymix.data.streams import IntArray
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="masks",
        argument="PATH",
        summary="PATH/images/ and PATH/masks/ with PNG masks of class numbers (255 = ignore) and "
        "PATH/classes.txt, or the same in PATH/{train,val,test}/",
        task="segmentation",
        target="mask",
        on_disk=True,
    ),
)

_SPLITS = ("train", "val", "test")
_GREY = ("1", "L", "LA", *SIXTEEN_BIT)
_LAYOUT = (
    "Arrange them as images/<name>.* and masks/<name>.png with classes.txt next to them, "
    "or the two folders in train/, val/ and test/."
)


def open_source(
    argument: str,
    faults: Faults,
    *,
    masks: str | None = None,
    stack: int | None = None,
    split_by: str | None = None,
) -> ScanSource:
    """Open ``PATH/images/`` and ``PATH/masks/``, or the two in ``PATH/{train,val,test}/``.

    ``PATH/classes.txt`` names a class on each line; line i, counted from 0, is the value i of the
    masks, and 255 is ignored. With a folder for each class, ``masks/<class>/<name>.png``, masks are
    multilabel: 0 is outside, anything else inside. ``PATH/groups.csv`` (``image,group``) gives
    which images are of one case.
    """
    if stack not in (None, 1):
        raise UserError(
            f"data.stack = {stack}: images of masks:{argument} have no neighbours. Leave it out, "
            "or take data of scans, such as uwgi:PATH."
        )
    check_choices(masks, split_by)
    root = existing_path("masks", argument)
    places = {name: root / name for name in _SPLITS if (root / name / "images").is_dir()}
    if (root / "images").is_dir():
        if places:
            raise UserError(
                f"{root} has images/ and {'/, '.join(places)}/ with images. Keep one of the two."
            )
        places = {"train": root}
    if "train" not in places:
        raise UserError(f"data masks:{argument}: {root} has no images/ to learn from. {_LAYOUT}")
    for place in places.values():
        if not (place / "masks").is_dir():
            raise UserError(f"{place} has images/, but no masks/. {_LAYOUT}")
    multilabel = _multilabel(places, masks)
    classes = _classes(root / "classes.txt", multilabel)
    background = None
    if not multilabel and BACKGROUND in classes:
        background = classes.index(BACKGROUND)
    pairs = {
        name: _pairs(place, classes if multilabel else None, len(places) > 1, faults)
        for name, place in places.items()
    }
    grouped = (root / "groups.csv").exists()
    if grouped:
        pairs = _grouped(root / "groups.csv", pairs, faults)
    meaning = Meaning(classes=len(classes), multilabel=multilabel, background=background)
    channels = _channels(pairs["train"])
    tables = {name: Pairs(listed, meaning, channels) for name, listed in pairs.items()}
    if grouped and split_by != "slice":
        report_shared_cases(tables, faults)
    return ScanSource(
        classes=tuple(classes),
        train=tables["train"],
        val=tables.get("val"),
        test=tables.get("test"),
        in_chans=channels,
        notes=() if grouped else ("no groups.csv: each image is taken for a case of its own",),
        masks=MaskKind(multilabel=multilabel, background=background),
        grouped=grouped,
    )


def _multilabel(places: dict[str, Path], masks: str | None) -> bool:
    """Return whether, by the folders, each class has its masks, and compare with what is wanted."""
    inside = {place / "masks": bool(folders(place / "masks")) for place in places.values()}
    if len(set(inside.values())) > 1:
        text = ", ".join(str(place) for place, deep in inside.items() if deep)
        raise UserError(
            f"{text}: only some splits have a folder per class. Arrange all splits alike."
        )
    multilabel = all(inside.values())
    if masks is not None and (masks == "multilabel") != multilabel:
        has = "a folder for each class" if multilabel else "no folders for the classes"
        raise UserError(
            f"task.options.masks = {masks!r}: {next(iter(inside))} has {has}, so its masks are "
            f"{MASKS[multilabel]}. Leave it out."
        )
    return multilabel


def _classes(path: Path, multilabel: bool) -> list[str]:
    try:
        text = regular(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing. Write the names of the classes, one per line."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {why}. Restore it.") from error
    names = [line.strip() for line in text.rstrip().split("\n")]
    why = ""
    if "" in names:
        why = f"line {names.index('') + 1} is empty; each line is the name of a value"
    elif len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        why = f"{twice!r} stands there twice"
    elif multilabel and BACKGROUND in names:
        why = f"{BACKGROUND!r} is no class where each class has its own masks"
    elif not multilabel and len(names) < 2:
        why = "it has one class only; at least 2 are needed to distinguish"
    elif len(names) > IGNORE:
        why = f"it has {len(names)} classes; {IGNORE} are the most, as {IGNORE} is ignored"
    if why:
        raise UserError(f"{path}: {why}. Correct it.")
    for line, name in enumerate(names, 1):
        if why := _no_file_name(name):
            raise UserError(
                f"{path}: line {line}: class {name!r} {why}, and masks are stored under the names "
                "of their classes. Give it another name."
            )
    return names


def _no_file_name(name: str) -> str:
    """Say why a folder cannot be called so on every system; nothing if it can."""
    if name in (".", ".."):
        return "means a folder"
    for character in name:
        if character in "/\\":
            return f"has {character!r} in it"
        if unicodedata.category(character) == "Cc":
            return "has a control character in it"
    return ""


def _pairs(place: Path, classes: list[str] | None, named: bool, faults: Faults) -> list[Pair]:
    """Match images and masks by their stems, in the order of these."""
    images: dict[str, list[Path]] = {}
    for path in sorted((place / "images").iterdir()):
        if is_image(path.name) and not path.is_dir():
            images.setdefault(path.stem, []).append(path)
        elif not path.name.startswith("."):
            faults.stranger(path)
    base = place / "masks"
    where = [base] if classes is None else [base / name for name in classes]
    for name in folders(base):
        if classes is None or name not in classes:
            raise UserError(
                f"{base / name}: class {name!r} is not in classes.txt. Add it there, or remove the "
                "folder."
            )
    masks: dict[str, list[Path | None]] = {}
    for k, folder in enumerate(where):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.suffix.lower() == ".png" and not path.name.startswith("."):
                masks.setdefault(path.stem, [None] * len(where))[k] = path
            elif path.is_file() and not path.name.startswith("."):
                faults.stranger(path)
    if not images:
        raise UserError(f"{place / 'images'} has no images. Add some, or remove the folder.")
    return [
        Pair(
            stem=stem,
            images=tuple(images.get(stem, ())),
            masks=tuple(masks.get(stem, [None] * len(where))),
            wanted=tuple(folder / f"{stem}.png" for folder in where),
            group=f"{place.name}/{stem}" if named else stem,
        )
        for stem in sorted({*images, *masks})
    ]


def _grouped(path: Path, pairs: dict[str, list[Pair]], faults: Faults) -> dict[str, list[Pair]]:
    """Give each pair the group that the table gives."""
    stems = {pair.stem for listed in pairs.values() for pair in listed}
    given: dict[str, tuple[str, int]] = {}
    for line, (image, group) in read_rows(
        path, ("image", "group"), faults.report, kind="bad groups"
    ):
        stem = Path(image).stem if is_image(image) and image not in stems else image
        before = given.setdefault(stem, (group, line))
        why = ""
        if stem not in stems:
            why = f"there is no image {image!r}"
        elif not group:
            why = f"image {image!r} has no group"
        elif before[0] != group:
            why = f"image {image!r} is in {group!r}, but in {before[0]!r} by line {before[1]}"
        if why:
            message = f"{path}: line {line}: {why}. Correct or remove it."
            faults.report("bad groups", f"{path}:{line}", message)
    left = sorted(stems - set(given))
    if left:
        message = f"{path} has no group for {len(left)} images: {some(left, 3)}. Add their rows."
        faults.report("bad groups", path, message)
    return {
        name: [
            replace(pair, group=given[pair.stem][0]) if pair.stem in given else pair
            for pair in listed
        ]
        for name, listed in pairs.items()
    }


def _channels(pairs: list[Pair]) -> int:
    """Return 1 if all images are grey by their headers, of a fixed sample where there are many."""
    for i in sample(len(pairs)).tolist():
        for path in pairs[i].images[:1]:
            try:
                with open_image(path) as image:
                    if image.mode not in _GREY:
                        return 3
            except DAMAGE:
                continue  # the table reports it
    return 1


_ONE_CHANNEL = ("1", "L", "P", *SIXTEEN_BIT)
_HEAD = 1 << 15  # bytes of each file that enter the fingerprint of a large set


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """An image and its mask."""

    stem: str  # name of both without suffix
    images: tuple[Path, ...]  # the image's file; several or none are a fault
    # the mask's file, or one of each class; None where it is missing
    masks: tuple[Path | None, ...]
    wanted: tuple[Path, ...]  # where the masks should be
    group: str  # what stays in one split


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What the values of masks mean."""

    classes: int
    multilabel: bool  # whether each class has a mask of its own, of 0 and anything else
    background: int | None  # number of the class that is no foreground; None for none


class Pairs(ScanTable):
    """Image files with mask files."""

    def __init__(self, pairs: Sequence[Pair], meaning: Meaning, channels: int) -> None:
        self.pairs = pairs
        self.meaning = meaning
        self.channels = channels
        self.labels = np.zeros(len(pairs), dtype=np.int64)
        self.groups = tuple(pair.group for pair in pairs)

    def select(self, rows: IntArray) -> Pairs:
        """Keep some pairs."""
        return Pairs([self.pairs[i] for i in rows.tolist()], self.meaning, self.channels)

    def name(self, i: int) -> str:
        """Give the image's file, or the mask's if there is none."""
        pair = self.pairs[i]
        there = [*pair.images, *(mask for mask in pair.masks if mask is not None)]
        return str(there[0])

    def scan_id(self, i: int) -> str:
        """Give the file's name without suffix."""
        return self.pairs[i].stem

    def numbered(self, i: int) -> str:
        """Give the file's name without suffix."""
        return self.pairs[i].stem

    def open(self, i: int) -> Image.Image:
        """Open the image."""
        if not self.pairs[i].images:
            raise FileNotFoundError(2, "the image is missing", self.name(i))
        return open_image(self.pairs[i].images[0])

    def size(self, i: int) -> Size:
        """Return height and width by the image's header."""
        refuse(self._unpaired(i))
        try:
            with self.open(i) as image:
                return image.height, image.width
        except DAMAGE as error:
            refuse([self._unreadable(i, error)])
            raise

    def pixels(self, i: int) -> Pixels:
        """Decode the image, grey or RGB, as `keymix.data.decode.convert` does."""
        refuse(self._unpaired(i))
        try:
            with self.open(i) as image:
                return to_array(convert(image, self.channels))
        except DAMAGE as error:
            refuse([self._unreadable(i, error)])
            raise

    def mask(self, i: int) -> Pixels:
        """Read the mask: class numbers, or a plane of 0 and 1 for each class."""
        refuse(self._unpaired(i))
        mask, faults = self._mask(i, self.size(i))
        refuse(faults)
        assert mask is not None
        return mask

    def inspect(self, i: int, *, decode: bool = True) -> Seen:
        """Find all that is wrong with the two files; the mask is always decoded."""
        faults = self._unpaired(i)
        if faults:
            return Seen(faults=faults)
        size = None
        try:
            with self.open(i) as image:
                size = (image.height, image.width)
                if decode:
                    convert(image, self.channels)
                else:
                    image.verify()
        except DAMAGE as error:
            faults.append(self._unreadable(i, error))
        mask, of_mask = self._mask(i, size)
        if mask is None:
            return Seen(faults=[*faults, *of_mask])
        found = self._classes(mask)
        return Seen(
            faults=faults,
            empty=found <= {self.meaning.background},
            classes=found,
            ignored=not self.meaning.multilabel and bool((mask == IGNORE).any()),
        )

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash names, lengths and, with ``content``, the first 32 KiB of each file."""
        pair = self.pairs[i]
        head, length = pair.stem.encode(), 0
        for path in (*pair.images, *pair.masks):
            if path is None:
                continue
            size = path.stat().st_size
            length += size
            head += f"\n{path.name} {size}\n".encode()
            if content:
                with regular(path).open("rb") as stream:
                    head += stream.read(_HEAD)
        return head_digest(length, head)

    def _unpaired(self, i: int) -> list[Fault]:
        """Say which of the two files is missing or there twice."""
        pair = self.pairs[i]
        if not pair.images:
            message = f"{self.name(i)}: the mask has no image of its name"
            return [Fault("missing image", message, self.name(i))]
        if len(pair.images) > 1:
            message = f"images of one stem: {some([str(path) for path in pair.images])}"
            return [Fault("images of one stem", message, self.name(i))]
        return [
            Fault("missing mask", f"{self.name(i)}: its mask {wanted} is missing", self.name(i))
            for path, wanted in zip(pair.masks, pair.wanted, strict=True)
            if path is None
        ]

    def _unreadable(self, i: int, error: Exception) -> Fault:
        message = f"cannot read image {self.name(i)}: {reason(error)}"
        return Fault("unreadable image", message, self.name(i))

    def _mask(self, i: int, size: Size | None) -> tuple[Pixels | None, list[Fault]]:
        """Read the mask of an image of a known size, or say what is wrong with it."""
        planes: list[Pixels] = []
        faults: list[Fault] = []
        for path in self.pairs[i].masks:
            assert path is not None
            values = _values(path)
            if isinstance(values, Fault):
                faults.append(values)
                continue
            if size is not None and values.shape != size:
                message = (
                    f"{path} has {values.shape[1]}x{values.shape[0]} pixels, its image "
                    f"{size[1]}x{size[0]}"
                )
                faults.append(Fault("size unlike the image", message, str(path)))
                continue
            if self.meaning.multilabel:
                planes.append((values != 0).astype(np.uint8))
                continue
            wrong = self._undeclared(path, values)
            faults += wrong
            if not wrong:
                planes.append(values.astype(np.uint8))
        if faults:
            return None, faults
        return (np.stack(planes) if self.meaning.multilabel else planes[0]), []

    def _undeclared(self, path: Path, values: NDArray[Any]) -> list[Fault]:
        outside = (values < 0) | (values >= self.meaning.classes)
        outside &= values != IGNORE
        if not outside.any():
            return []
        found, counts = np.unique(values[outside], return_counts=True)
        wrong = list(zip(found.tolist(), counts.tolist(), strict=True))
        listed = some([f"{value} ({count} pixels)" for value, count in wrong], 3)
        message = (
            f"{path} has values that classes.txt does not declare: {listed}; it declares 0 to "
            f"{self.meaning.classes - 1}, and {IGNORE} is ignored"
        )
        return [Fault("undeclared value", message, str(path))]

    def _classes(self, mask: Pixels) -> frozenset[int]:
        """Number the classes that any pixel has."""
        if self.meaning.multilabel:
            return frozenset(np.flatnonzero(mask.any(axis=(1, 2))).tolist())
        return frozenset(np.unique(mask).tolist()) - {IGNORE}


def _values(path: Path) -> NDArray[Any] | Fault:
    """Read the values of a mask, those of a palette as its numbers."""
    try:
        with open_image(path) as image:
            if image.mode not in _ONE_CHANNEL:
                message = f"{path} is {image.mode}: a mask has one channel with the class numbers"
                return Fault("colour mask", message, str(path))
            values: NDArray[Any] = np.asarray(image)
            return values.astype(np.uint8) if image.mode == "1" else values
    except DAMAGE as error:
        return Fault("unreadable mask", f"cannot read mask {path}: {reason(error)}", str(path))
