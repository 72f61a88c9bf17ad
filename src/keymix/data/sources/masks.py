# SPDX-License-Identifier: Apache-2.0
"""Images with PNG masks, in two folders or in one, with or without folders for the splits above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.class_names import ClassNames, read_class_names
from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    Size,
    convert,
    open_image,
    reading,
    reason,
    refuse_turned,
    to_array,
)
from keymix.data.files import (
    IMAGE_FOLDERS,
    MASK_FOLDERS,
    SPLITS,
    existing_path,
    folder_named,
    folders,
    is_image,
    read_rows,
    regular,
    split_named,
)
from keymix.data.kinds import BACKGROUND, IGNORE, MaskKind
from keymix.data.segmentation.table import (
    Pixels,
    ScanSource,
    ScanTable,
    Seen,
    check_choices,
    report_shared_cases,
)
from keymix.data.sources.base import REMEDY, Fault, Faults, head_digest, refuse, some
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

_MARKS = ("_mask", "_label", "_seg")
"""What the name of a mask may end with behind the name of its image."""
_ONE_CHANNEL = ("1", "L", "P", *SIXTEEN_BIT)
_GREY = ("1", "L", "LA", *SIXTEEN_BIT)
_HEAD = 1 << 15  # bytes of each file that enter the fingerprint of a large set
_LAYOUT = (
    "Arrange them as images/<name>.* and masks/<name>.png, or with <name>_mask.png next to "
    "<name>.*; classes.txt stands above, and train/, val/ and test/ may stand between."
)


def open_source(
    argument: str,
    faults: Faults,
    *,
    masks: str | None = None,
    stack: int | None = None,
    split_by: str | None = None,
) -> ScanSource:
    """Open a folder of images and one of masks, or the two in ``PATH/{train,val,test}/``.

    The folders have one of the names `IMAGE_FOLDERS` and `MASK_FOLDERS`; images and masks may also
    be in one folder. ``PATH/classes.txt`` says which value or colour of the masks is which class;
    255 is ignored. With a folder for each class, ``masks/<class>/<name>.png``, masks are
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
    places = _places(root, argument)
    multilabel = _multilabel(places, masks)
    names = read_class_names(root / "classes.txt")
    classes = names.names
    _check_classes(root / "classes.txt", classes, multilabel)
    background = classes.index(BACKGROUND) if BACKGROUND in classes else None
    pairs = {
        name: _pairs(place, classes if multilabel else None, name * (len(places) > 1), faults)
        for name, place in places.items()
    }
    grouped = (root / "groups.csv").exists()
    if grouped:
        pairs = _grouped(root / "groups.csv", pairs, faults)
    kind = MaskKind(multilabel=multilabel, background=background)
    channels = _channels(pairs["train"])
    tables = {name: Pairs(listed, kind, names, channels) for name, listed in pairs.items()}
    if grouped and split_by != "slice":
        report_shared_cases(tables, faults)
    return ScanSource(
        classes=classes,
        train=tables["train"],
        val=tables.get("val"),
        test=tables.get("test"),
        in_chans=channels,
        notes=() if grouped else ("no groups.csv: each image is taken for a case of its own",),
        masks=kind,
        grouped=grouped,
    )


@dataclass(frozen=True)
class _Place:
    """Where images and masks of a split are, perhaps in one folder."""

    images: Path
    masks: Path


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


def _multilabel(places: dict[str, _Place], masks: str | None) -> bool:
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


def _check_classes(path: Path, names: Sequence[str], multilabel: bool) -> None:
    why = ""
    if multilabel and BACKGROUND in names:
        why = f"{BACKGROUND!r} is no class where each class has its own masks"
    elif not multilabel and len(names) < 2:
        why = "it has one class only; at least 2 are needed to distinguish"
    elif len(names) > IGNORE:
        why = f"it has {len(names)} classes; {IGNORE} are the most, as {IGNORE} is ignored"
    if why:
        raise UserError(f"{path}: {why}. Correct it.")


def _pairs(place: _Place, classes: Sequence[str] | None, split: str, faults: Faults) -> list[Pair]:
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
        Pair(
            stem=stem,
            images=tuple(images.get(stem, ())),
            masks=tuple(masks.get(stem, {}).get(each, each / f"{stem}.png") for each in where),
            group=f"{split}/{stem}" if split else stem,
        )
        for stem in sorted({*images, *masks})
    ]


def _visible(folder: Path) -> list[Path]:
    """List the visible files of a folder, if it is there."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if not path.name.startswith(".") and not path.is_dir()]


def _grouped(path: Path, pairs: dict[str, list[Pair]], faults: Faults) -> dict[str, list[Pair]]:
    """Give each pair the group that the table gives."""
    stems = {pair.stem for listed in pairs.values() for pair in listed}
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
            message = f"{path}: line {line}: {why}. Correct or remove it."
            faults.report("bad row", f"{path}:{line}", message)
    left = sorted(stems - set(given))
    if left:
        message = f"{path} has no group for {len(left)} images: {some(left, 3)}. Add their rows."
        faults.report("bad row", path, message)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """An image and its mask."""

    stem: str  # name of the image without suffix
    images: tuple[Path, ...]  # the image's file; several or none are a fault
    masks: tuple[Path, ...]  # the mask's file, or one of each class; where it is or should be
    group: str  # what stays in one split


class Pairs(ScanTable):
    """Image files with mask files."""

    def __init__(
        self, pairs: Sequence[Pair], kind: MaskKind, names: ClassNames, channels: int
    ) -> None:
        self.pairs = pairs
        self.kind, self.names, self.channels = kind, names, channels
        self.labels = np.zeros(len(pairs), dtype=np.int64)
        self.groups = tuple(pair.group for pair in pairs)

    def select(self, rows: IntArray) -> Pairs:
        """Keep some pairs."""
        return Pairs([self.pairs[i] for i in rows.tolist()], self.kind, self.names, self.channels)

    def name(self, i: int) -> str:
        """Give the image's file, or the mask's if there is none."""
        pair = self.pairs[i]
        return str((*pair.images, *pair.masks)[0])

    def scan_id(self, i: int) -> str:
        """Give the file's name without suffix."""
        return self.pairs[i].stem

    def numbered(self, i: int) -> str:
        """Give the file's name without suffix."""
        return self.pairs[i].stem

    def open(self, i: int) -> Image.Image:
        """Open the image, unless EXIF turns it: its mask would not turn along."""
        images = self.pairs[i].images
        if len(images) != 1:
            text = some([str(path) for path in images])
            raise ValueError(f"several of one name: {text}" if images else "the mask has no image")
        image = open_image(images[0])
        refuse_turned(image, self.name(i))
        return image

    def size(self, i: int) -> Size:
        """Return height and width by the image's header."""
        with reading(self.name(i), REMEDY), self.open(i) as image:
            return image.height, image.width

    def pixels(self, i: int) -> Pixels:
        """Decode the image, grey or RGB, as `keymix.data.decode.convert` does."""
        with reading(self.name(i), REMEDY), self.open(i) as image:
            return to_array(convert(image, self.channels))

    def mask(self, i: int) -> Pixels:
        """Read the mask: class numbers, or a plane of 0 and 1 for each class."""
        mask, faults = self._mask(i, self.size(i))
        refuse(faults)
        assert mask is not None
        return mask

    def inspect(self, i: int, *, decode: bool = True) -> Seen:
        """Find all that is wrong with the two files; the mask is always decoded."""
        faults: list[Fault] = []
        size = None
        try:
            with self.open(i) as image:
                size = (image.height, image.width)
                if decode:
                    convert(image, self.channels)
                else:
                    image.verify()
        except DAMAGE as error:
            message = f"cannot read image {self.name(i)}: {reason(error)}"
            faults.append(Fault("unreadable", message, self.name(i)))
        mask, of_mask = self._mask(i, size)
        if mask is None:
            return Seen(faults=[*faults, *of_mask])
        if self.kind.multilabel:
            found = frozenset(np.flatnonzero(mask.any(axis=(1, 2))).tolist())
        else:
            found = frozenset(np.unique(mask).tolist()) - {IGNORE}
        return Seen(
            faults=faults,
            empty=found <= {self.kind.background},
            classes=found,
            ignored=not self.kind.multilabel and bool((mask == IGNORE).any()),
        )

    def digest(self, i: int, *, content: bool = True) -> bytes:
        """Hash names, lengths and, with ``content``, the first 32 KiB of each file."""
        pair = self.pairs[i]
        head, length = pair.stem.encode(), 0
        for path in (*pair.images, *pair.masks):
            size = path.stat().st_size
            length += size
            head += f"\n{path.name} {size}\n".encode()
            if content:
                with regular(path).open("rb") as stream:
                    head += stream.read(_HEAD)
        return head_digest(length, head)

    def _mask(self, i: int, size: Size | None) -> tuple[Pixels | None, list[Fault]]:
        """Read the mask of an image of a known size, or say what is wrong with it."""
        planes = [self._plane(path, size) for path in self.pairs[i].masks]
        faults = [plane for plane in planes if isinstance(plane, Fault)]
        found = [plane for plane in planes if not isinstance(plane, Fault)]
        if faults:
            return None, faults
        return (np.stack(found) if self.kind.multilabel else found[0]), []

    def _plane(self, path: Path, size: Size | None) -> Pixels | Fault:
        """Read a mask's file, or say what is wrong with it."""
        try:
            with open_image(path) as image:
                values, coloured = _values(image, coloured=self.names.colours is not None)
        except DAMAGE as error:
            return Fault("unreadable", f"cannot read mask {path}: {reason(error)}", str(path))
        if size is not None and values.shape != size:
            height, width = values.shape
            message = f"{path} has {width}x{height} pixels, its image {size[1]}x{size[0]}"
            return Fault("wrong size", message, str(path))
        if self.kind.multilabel:
            inside: Pixels = (values != 0).astype(np.uint8)
            return inside
        mask, unknown = self._numbered(values, coloured=coloured)
        if not unknown.any():
            return mask
        wrong, counts = np.unique(values[unknown], return_counts=True)
        listed = some(
            [
                f"{_colour(value) if coloured else value} ({count} pixels)"
                for value, count in zip(wrong.tolist(), counts.tolist(), strict=True)
            ],
            3,
        )
        message = f"{path} has values that classes.txt does not declare: {listed}"
        return Fault("bad value", f"{message}; {IGNORE} is ignored", str(path))

    def _numbered(
        self, values: NDArray[Any], *, coloured: bool
    ) -> tuple[Pixels, NDArray[np.bool_]]:
        """Number the classes of values or colours; and say which pixels have none."""
        codes = np.arange(len(self.names.names))
        if coloured:
            codes = np.array([r << 16 | g << 8 | b for r, g, b in self.names.colours or ()])
        elif self.names.values is not None:
            codes = np.array(self.names.values)
        order = np.argsort(codes)
        at = np.searchsorted(codes[order], values).clip(max=len(codes) - 1)
        known = codes[order][at] == values
        mask = np.where(known, order[at], IGNORE).astype(np.uint8)
        return mask, ~known if coloured else ~known & (values != IGNORE)


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
