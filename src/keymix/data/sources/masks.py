# SPDX-License-Identifier: Apache-2.0
"""Images with PNG masks, in two folders or in one, with or without folders for the splits above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision import tv_tensors

from keymix.data.class_names import ClassNames, check_classes, read_class_names
from keymix.data.decode import DAMAGE, SIXTEEN_BIT, Encoded, open_image, reason
from keymix.data.files import (
    IMAGE_FOLDERS,
    MASK_FOLDERS,
    existing_path,
    folder_named,
    folders,
    is_image,
    read_rows,
    split_named,
)
from keymix.data.kinds import IGNORE
from keymix.data.mask_facts import report_shared_cases
from keymix.data.record import DataFacts
from keymix.data.sample import SPLITS, BadSampleError, Fault, Faults, Row, Source, refuse, some
from keymix.data.specs import MASKS, source
from keymix.data.splits import sample
from keymix.errors import UserError

_MARKS = ("_mask", "_label", "_seg")
"""What the name of a mask may end with behind the name of its image."""
_ONE_CHANNEL = ("1", "L", "P", *SIXTEEN_BIT)
_GREY = ("1", "L", "LA", *SIXTEEN_BIT)
_LAYOUT = (
    "Arrange them as images/<name>.* and masks/<name>.png, or with <name>_mask.png next to "
    "<name>.*; classes.txt stands above, and train/, val/ and test/ may stand between."
)


@source(
    "masks",
    argument="PATH",
    summary="PATH/images/ and PATH/masks/ with PNG masks of class numbers (255 = ignore) and "
    "PATH/classes.txt, or the same in PATH/{train,val,test}/",
    task="segmentation",
    target="mask",
    on_disk=True,
)
def open_masks(
    argument: str,
    faults: Faults,
    *,
    masks: str | None = None,
    stack: int = 1,
    split_by: str | None = None,
) -> Source:
    """Open a folder of images and one of masks, or the two in ``PATH/{train,val,test}/``.

    The folders have one of the names `IMAGE_FOLDERS` and `MASK_FOLDERS`; images and masks may also
    be in one folder. ``PATH/classes.txt`` says which value or colour of the masks is which class;
    255 is ignored. With a folder for each class, ``masks/<class>/<name>.png``, masks are
    multilabel: 0 is outside, anything else inside. ``PATH/groups.csv`` (``image,group``) gives
    which images are of one case.
    """
    if stack != 1:
        raise UserError(
            f"data.stack = {stack}: images of masks:{argument} have no neighbours. Leave it out, "
            "or take data of scans, such as uwgi:PATH."
        )
    root = existing_path("masks", argument)
    places = _places(root, argument)
    multilabel = _multilabel(places, masks)
    names = read_class_names(root / "classes.txt")
    names = names if multilabel else names.without_ignored()
    check_classes(root / "classes.txt", names.names, multilabel=multilabel)
    deep = names.names if multilabel else None
    pairs = {split: _pairs(place, deep, faults) for split, place in places.items()}
    table = root / "groups.csv"
    grouped = table.exists()
    stems = {pair.stem for listed in pairs.values() for pair in listed}
    groups = _groups(table, stems, faults) if grouped else {}
    rows = []
    for split, listed in pairs.items():
        for pair in listed:
            alone = pair.stem if len(places) == 1 else f"{split}/{pair.stem}"
            target = partial(_mask, pair.masks, names, multilabel=multilabel)
            rows.append(_row(pair, split, groups.get(pair.stem) or alone, target))
    if grouped and split_by != "slice":
        report_shared_cases(rows, faults)
    return Source(
        rows=rows,
        classes=names.names,
        in_chans=_channels(pairs["train"]),
        test_fraction=0.04,
        notes=() if grouped else ("no groups.csv: each image is taken for a case of its own",),
        grouped=grouped,
        facts=DataFacts(masks=MASKS[multilabel], stack=1),
    )


class _Place(NamedTuple):
    """Where images and masks of a split are, perhaps in one folder."""

    images: Path
    masks: Path


class _Pair(NamedTuple):
    """An image and its mask."""

    stem: str  # name of the image without suffix
    images: Sequence[Path]  # the image's file, there or not; several are a fault
    masks: tuple[Path, ...]  # the mask's file, or one of each class; where it is or should be


def _row(pair: _Pair, split: str, group: str, target: Callable[[], tv_tensors.Mask]) -> Row:
    """Make a sample of an image and its mask."""
    path = pair.images[0]
    faults: tuple[Fault, ...] = ()
    if len(pair.images) > 1:
        listed = some([str(each) for each in pair.images])
        message = f"cannot read image {path}: several of one name: {listed}"
        faults = (Fault(str(path), message),)
    return Row(
        id=str(path),
        image=Encoded(path, str(path), key=path.name, placed=True),
        target=target,
        split=split,
        group=group,
        name=pair.stem,
        faults=faults,
    )


def _place(at: Path) -> _Place | None:
    """Find the folders of images and masks in a folder, which may be both itself."""
    images = folder_named(at, IMAGE_FOLDERS) or at
    masks = folder_named(at, MASK_FOLDERS) or images
    names = [path for path in images.iterdir() if is_image(path.name)]
    beside = any(path.stem.endswith(_MARKS) and path.suffix.lower() == ".png" for path in names)
    return _Place(images, masks) if names and (masks != images or beside) else None


def _places(root: Path, argument: str) -> dict[str, _Place]:
    """Find where the images and masks of each split are."""
    found: dict[str, list[_Place]] = {split: [] for split in SPLITS}
    for name in folders(root):
        if (split := split_named(name)) and (place := _place(root / name)) is not None:
            found[split].append(place)
    places = {split: several[0] for split, several in found.items() if several}
    if twice := [split for split, several in found.items() if len(several) > 1]:
        raise UserError(f"{root} has several folders of {twice[0]}. Keep one of them.")
    whole = _place(root)
    if whole is not None and places:
        raise UserError(f"{root} has images, and {'/, '.join(places)}/ have too. Keep one of them.")
    if whole is not None:
        places = {"train": whole}
    if "train" not in places:
        raise UserError(f"data masks:{argument}: {root} has no images with masks. {_LAYOUT}")
    return places


def _multilabel(places: Mapping[str, _Place], masks: str | None) -> bool:
    """Return whether, by the folders, each class has its masks, and compare with what is wanted."""
    inside = {
        place.masks: place.masks != place.images and bool(folders(place.masks))
        for place in places.values()
    }
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


def _pairs(place: _Place, classes: Sequence[str] | None, faults: Faults) -> list[_Pair]:
    """Match images and masks by their names, in the order of these."""
    where = [place.masks] if classes is None else [place.masks / name for name in classes]
    if place.masks != place.images:
        for folder in (place.masks / name for name in folders(place.masks)):
            if folder not in where:
                raise UserError(
                    f"{folder}: class {folder.name!r} is not in classes.txt. Add it there, or "
                    "remove the folder."
                )
    images: dict[str, list[Path]] = {}
    masks: dict[str, dict[Path, Path]] = {}  # by name of the image and folder
    for path in _visible(place.images):
        mark = next((mark for mark in _MARKS if path.stem.endswith(mark)), "")
        if place.masks == place.images and mark and path.suffix.lower() == ".png":
            masks.setdefault(path.stem.removesuffix(mark), {})[place.masks] = path
        elif is_image(path.name):
            images.setdefault(path.stem, []).append(path)
        else:
            faults.stranger(path)
    for folder in where if place.masks != place.images else []:
        for path in _visible(folder):
            if path.suffix.lower() != ".png":
                faults.stranger(path)
                continue
            bare = next((path.stem.removesuffix(m) for m in _MARKS if path.stem.endswith(m)), "")
            of = bare if path.stem not in images and bare in images else path.stem
            masks.setdefault(of, {})[folder] = path
    return [
        _Pair(
            stem,
            images.get(stem, [place.images / f"{stem}.*"]),
            tuple(masks.get(stem, {}).get(each, each / f"{stem}.png") for each in where),
        )
        for stem in sorted({*images, *masks})
    ]


def _visible(folder: Path) -> list[Path]:
    """List the visible files of a folder, if it is there."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if not path.name.startswith(".") and not path.is_dir()]


def _groups(path: Path, stems: set[str], faults: Faults) -> dict[str, str]:
    """Read the group of each image by its name."""
    given: dict[str, tuple[str, int]] = {}
    for line, (image, group) in read_rows(path, ("image", "group"), faults.report):
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
            faults.report(f"{path}: line {line}", f"{why}. Correct or remove it.")
    if left := sorted(stems - set(given)):
        faults.report(
            path, f"it has no group for {len(left)} images: {some(left, 3)}. Add their rows."
        )
    return {stem: group for stem, (group, _) in given.items()}


def _channels(pairs: Sequence[_Pair]) -> int:
    """Return 1 if all images are grey by their headers, of a fixed sample where there are many."""
    for i in sample(len(pairs)).tolist():
        try:
            with open_image(pairs[i].images[0]) as image:
                if image.mode not in _GREY:
                    return 3
        except DAMAGE:
            continue  # said when it is read
    return 1


def _mask(paths: Sequence[Path], names: ClassNames, *, multilabel: bool) -> tv_tensors.Mask:
    """Read a mask: class numbers, or a plane of 0 and 1 for each class."""
    planes: list[NDArray[np.uint8]] = []
    faults: list[Fault] = []
    for path in paths:
        try:
            planes.append(_plane(path, names, multilabel=multilabel))
        except BadSampleError as error:
            faults += error.faults
            continue
        if planes[-1].shape != planes[0].shape:
            message = f"{path} has another size than the masks of other classes"
            faults.append(Fault(str(path), message))
    refuse(faults)
    return tv_tensors.Mask(torch.from_numpy(np.stack(planes) if multilabel else planes[0]))


def _plane(path: Path, names: ClassNames, *, multilabel: bool) -> NDArray[np.uint8]:
    """Read a mask's file."""
    try:
        with open_image(path) as image:
            values, coloured = _values(image, coloured=names.colours is not None)
    except DAMAGE as error:
        message = f"cannot read mask {path}: {reason(error)}"
        raise BadSampleError([Fault(str(path), message)]) from error
    if multilabel:
        inside: NDArray[np.uint8] = (values != 0).astype(np.uint8)
        return inside
    mask, unknown = _numbered(values, names, coloured=coloured)
    if unknown.any():
        wrong, counts = np.unique(values[unknown], return_counts=True)
        listed = [
            f"{_colour(value) if coloured else value} ({count} pixels)"
            for value, count in zip(wrong.tolist(), counts.tolist(), strict=True)
        ]
        message = f"{path} has values that classes.txt does not declare: {some(listed, 3)}"
        refuse([Fault(str(path), f"{message}; {IGNORE} is ignored")])
    return mask


def _numbered(
    values: NDArray[Any], names: ClassNames, *, coloured: bool
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Number the classes of values or colours; and say which pixels have none."""
    codes = np.arange(len(names.names))
    if coloured:
        codes = np.array([r << 16 | g << 8 | b for r, g, b in names.colours or ()])
    elif names.values is not None:
        codes = np.array(names.values)
    order = np.argsort(codes)
    at = np.searchsorted(codes[order], values).clip(max=len(codes) - 1)
    known = codes[order][at] == values
    mask = np.where(known, order[at], IGNORE).astype(np.uint8)
    wrong = ~known & (values != names.ignored)
    return mask, wrong if coloured else wrong & (values != IGNORE)


def _values(image: Image.Image, *, coloured: bool) -> tuple[NDArray[Any], bool]:
    """Read a number of each pixel, and whether it is a colour; palettes stay as their numbers.

    Three equal channels are one, unless classes have colours.
    """
    if image.mode in _ONE_CHANNEL:
        values: NDArray[Any] = np.asarray(image)
        return values.astype(np.uint8) if image.mode == "1" else values, False
    channels = np.asarray(image.convert("RGB")).astype(np.int64)
    if coloured:
        return channels @ np.array([1 << 16, 1 << 8, 1]), True
    if (channels != channels[..., :1]).any():
        raise ValueError(
            "it is in colour: write 'R G B name' for each class in classes.txt, or store class "
            "numbers in one channel"
        )
    return channels[..., 0], False


def _colour(value: int) -> str:
    return f"{value >> 16} {value >> 8 & 255} {value & 255}"
