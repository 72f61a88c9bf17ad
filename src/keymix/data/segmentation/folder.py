# SPDX-License-Identifier: Apache-2.0
"""A folder of images and one of PNG masks, with or without folders for the splits above."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

from keymix.data.decode import DAMAGE, SIXTEEN_BIT, open_image
from keymix.data.kinds import BACKGROUND, IGNORE, MaskKind
from keymix.data.measure import sample
from keymix.data.regular import regular
from keymix.data.segmentation.pairs import Meaning, Pair, Pairs
from keymix.data.segmentation.rows import read_rows
from keymix.data.segmentation.table import ScanSource, tell_shared
from keymix.data.sources.base import Faults, some
from keymix.data.sources.folder import folders, is_image
from keymix.data.specs import MASKS, SPLIT_BY, existing_path
from keymix.errors import UserError, unknown

_SPLITS = ("train", "val", "test")
_GREY = ("1", "L", "LA", *SIXTEEN_BIT)
_LAYOUT = (
    "Lay them as images/<name>.* and masks/<name>.png with classes.txt beside, or the two folders "
    "in train/, val/ and test/."
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
    multilabel: 0 is outside, anything else inside. ``PATH/groups.csv`` (``image,group``) tells
    which images are of one case.
    """
    if stack not in (None, 1):
        raise UserError(
            f"data.stack = {stack}: images of masks:{argument} have no neighbours. Leave it out, "
            "or take data of scans, such as uwgi:PATH."
        )
    if split_by not in (None, *SPLIT_BY):
        raise unknown("data.split_by", str(split_by), SPLIT_BY)
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
        tell_shared(tables, faults)
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
    """Tell by the folders whether each class has its masks, and compare with what is wanted."""
    if masks is not None and masks not in MASKS:
        raise unknown("task.options.masks", masks, MASKS)
    inside = {place / "masks": bool(folders(place / "masks")) for place in places.values()}
    if len(set(inside.values())) > 1:
        told = ", ".join(str(place) for place, deep in inside.items() if deep)
        raise UserError(f"{told}: only some splits have a folder a class. Lay all splits alike.")
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
            f"{path} is missing. Write the names of the classes, one a line."
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
        why = "it has one class only; at least 2 are needed to tell apart"
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
    """Give each pair the group that the table tells."""
    stems = {pair.stem for listed in pairs.values() for pair in listed}
    given: dict[str, tuple[str, int]] = {}
    for line, (image, group) in read_rows(path, ("image", "group"), faults, kind="bad groups"):
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
            told = f"{path}: line {line}: {why}. Correct or remove it."
            faults.tell("bad groups", f"{path}:{line}", told)
    left = sorted(stems - set(given))
    if left:
        told = f"{path} has no group for {len(left)} images: {some(left, 3)}. Add their rows."
        faults.tell("bad groups", path, told)
    return {
        name: [
            replace(pair, group=given[pair.stem][0]) if pair.stem in given else pair
            for pair in listed
        ]
        for name, listed in pairs.items()
    }


def _channels(pairs: list[Pair]) -> int:
    """Tell 1 if all images are grey by their headers, of a fixed sample where there are many."""
    for i in sample(len(pairs)).tolist():
        for path in pairs[i].images[:1]:
            try:
                with open_image(path) as image:
                    if image.mode not in _GREY:
                        return 3
            except DAMAGE:
                continue  # it is told by the table
    return 1
