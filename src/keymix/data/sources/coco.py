# SPDX-License-Identifier: Apache-2.0
"""Images with instances in the format of COCO: annotation files and folders of images.

Test is the validation split, on which results are reported; validation is split off from train.
Where no annotation of train has an outline, instances are boxes alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask

from keymix.data.decode import DAMAGE, Encoded, open_image
from keymix.data.files import SPLIT_NAMES, existing_path, split_named
from keymix.data.instances import FloatArray, Instances, Outline, encoded, read_region
from keymix.data.record import DataFacts
from keymix.data.sample import Fault, Faults, Row, Size, Source, some
from keymix.data.specs import source
from keymix.errors import UserError

_FILE = "_annotations.coco.json"
_LAYOUT = (
    "Arrange the data as annotations/instances_train2017.json with the images in train2017/, and "
    f"likewise for val; or as train.json with train/; or as train/{_FILE} next to its images."
)
_BOXES_ALONE = "no annotation of train has an outline: boxes alone are learned"
_OUTSIDE = 1.0  # pixels by which a box or a polygon may leave its image: it is cut off
_LEAST = 1e-3  # pixels of the side of a box, below which it has none
_LARGEST = 1 << 63  # of an id
_UNKNOWN = (0, 0)  # the size of an image that cannot be read


@source(
    "coco",
    argument="PATH",
    summary="PATH/annotations/instances_{train,val}*.json and the folders of images that they "
    "name; test is val",
    task="detection",
    target="boxes",
    on_disk=True,
)
def open_coco(argument: str, faults: Faults) -> Source:
    """Open ``PATH`` with annotation files for train and, optionally, val and test.

    ``PATH/annotations/instances_train2017.json`` has its images in ``PATH/train2017/`` or
    ``PATH/images/train2017/``. Simpler names serve too: ``PATH/train.json`` with ``PATH/train/``,
    or ``PATH/train/_annotations.coco.json`` next to its images.
    """
    del faults  # all are of an image, or loose
    root = existing_path("coco", argument)
    places = {name: place for name in SPLIT_NAMES if (place := _place(root, name)) is not None}
    if "train" not in places:
        raise UserError(f"data coco:{argument}: {root} has no annotations to learn from. {_LAYOUT}")
    whole = {name: _parsed(path) for name, (path, _) in places.items()}
    classes = _categories(places["train"][0], whole["train"]["categories"])
    for name, (path, _) in places.items():
        for key, said in _categories(path, whole[name]["categories"]).items():
            if said != classes.get(key, said):
                raise UserError(
                    f"{path}: category {key} is {said!r}, and {classes[key]!r} in train. Use one "
                    "list of categories."
                )
    outlined = any(map(_has_outline, whole["train"]["annotations"]))
    numbers = {key: k for k, key in enumerate(classes)}
    rows, loose = list[Row](), list[Fault]()
    for name, (path, folder) in places.items():
        reader, content = _Reader(path, folder, numbers, outlined), whole.pop(name)
        images = reader.images(content["images"])
        reader.annotations(content["annotations"], images)
        rows += [image.row(folder, name) for image in images.values()]
        loose += reader.loose
    often = Counter(classes.values())
    return Source(
        rows=rows,
        classes=tuple(
            f"{name} ({key})" if often[name] > 1 else name for key, name in classes.items()
        ),
        image_size=(800, 1333),
        notes=() if outlined else (_BOXES_ALONE,),
        facts=DataFacts(class_ids=tuple(classes), outlines=outlined),
        loose=tuple(loose),
    )


def _place(root: Path, split: str) -> tuple[Path, Path] | None:
    """Find the annotation file of a split and the folder of its images."""
    found: dict[Path, list[Path]] = {}
    notes = root / "annotations"
    for name in SPLIT_NAMES[split]:
        for path in sorted(notes.glob(f"instances_{name}*.json")):
            stem = path.stem.removeprefix("instances_")
            found[path] = [root / stem, root / "images" / stem]
        for path in (notes / f"{name}.json", root / f"{name}.json"):
            found[path] = [root / name, root / "images" / name, root / "images"]
        found[root / name / _FILE] = [root / name]
    found = {path: folders for path, folders in found.items() if path.exists()}
    if not found:
        return None
    if len(found) > 1:
        names = some([str(path.relative_to(root)) for path in found])
        raise UserError(f"{root} has several annotation files for {split}: {names}. Keep one.")
    ((path, folders),) = found.items()
    for folder in folders:
        if folder.is_dir():
            return path, folder
    wanted = " nor ".join(f"{folder}/" for folder in folders)
    raise UserError(f"{path}: there is no {wanted} with its images. {_LAYOUT}")


def _parsed(path: Path) -> dict[str, list[Any]]:
    """Parse an annotation file and check its outermost form."""
    try:
        found: dict[str, list[Any]] = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Restore it.") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}. Restore it.") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(found, dict) or not isinstance(found.get(key), list):
            raise UserError(
                f"{path} has no list {key!r}: it is no annotation file of COCO's format with "
                "instances. Name other data."
            )
        if key != "annotations" and not found[key]:
            raise UserError(f"{path}: its list {key!r} is empty. Add some.")
    return found


def _categories(path: Path, raw: list[Any]) -> dict[int, str]:
    """Read the categories in the order of their ids."""
    classes: dict[int, str] = {}
    for number, entry in enumerate(raw):
        key, name = _whole(entry, "id"), entry.get("name") if isinstance(entry, dict) else None
        why = "has the id of another" if key in classes else ""
        if key is None or not isinstance(name, str) or not name.strip():
            why = f"is {_short(entry)}, without a whole number id and a name"
        if why or key is None:
            raise UserError(f"{path}: categories[{number}] {why}. Correct it.")
        classes[key] = str(name).strip()
    return dict(sorted(classes.items()))


class _Instance(NamedTuple):
    """An annotation as it was read."""

    label: int
    box: FloatArray
    area: float
    crowd: bool
    outline: Outline | None


@dataclass
class _Image:
    """An image while its annotations are read."""

    id: int
    file: str  # below the folder of images
    size: Size
    outlined: bool
    instances: list[_Instance] = field(default_factory=list)
    unfit: list[Fault] = field(default_factory=list)

    def row(self, folder: Path, split: str) -> Row:
        """Put the annotations together."""
        found, path = self.instances, folder / self.file
        first, _, rest = self.file.partition("/")
        name = (rest if split_named(first) else self.file).rpartition(".")[0]
        instances = Instances(
            image_id=self.id,
            size=self.size,
            labels=np.array([each.label for each in found], dtype=np.int64),
            boxes=np.array([each.box for each in found], dtype=np.float64).reshape(-1, 4),
            areas=np.array([each.area for each in found], dtype=np.float64),
            crowd=np.array([each.crowd for each in found], dtype=np.bool_),
            outlines=tuple(each.outline for each in found if each.outline is not None)
            if self.outlined
            else None,
            unfit=tuple(self.unfit),
        )
        image = Encoded(path, str(path), key=self.file, placed=True)
        return Row(id=str(path), image=image, target=instances, split=split, name=name)


class _Reader:
    """Reads an annotation file, and goes on after each fault; those of no image are loose."""

    def __init__(
        self, path: Path, folder: Path, label_of: Mapping[int, int], outlined: bool
    ) -> None:
        self.path, self.folder, self.label_of, self.outlined = path, folder, label_of, outlined
        self.loose: list[Fault] = []

    def images(self, raw: list[Any]) -> dict[int, _Image]:
        """Read the images by their ids; refuse a file of which none can be used."""
        images: dict[int, _Image] = {}
        seen = set[Any]()
        for number, entry in enumerate(raw):
            key, said = _whole(entry, "id"), entry if isinstance(entry, dict) else {}
            file: Any = said.get("file_name")
            why = ""
            if key is None:
                why = f"has the id {_short(said.get('id'))}, which is no whole number"
            elif not isinstance(file, str) or not file:
                why = f"has the file_name {_short(file)}"
            elif key in images:
                why = f"has the id {key} of another"
            elif file in seen:
                why = f"is {file!r} once more"
            if why or key is None:
                place = f"{self.path}: images[{number}]"
                self.loose.append(Fault(place, f"{place} {why}"))
                continue
            seen.add(file)
            file = _below(self.folder, file)
            height, width = (_whole(entry, side) or 0 for side in ("height", "width"))
            known = height > 0 and width > 0
            size = (height, width) if known else _header(self.folder / file)
            images[key] = _Image(key, file, size, self.outlined)
        if not images:
            raise UserError(
                f"{self.path}: none of its {len(raw):,} images can be used. The first: "
                f"{self.loose[0].message.removeprefix(f'{self.path}: ')}. Correct them."
            )
        return images

    def annotations(self, raw: list[Any], images: Mapping[int, _Image]) -> None:
        """Read the annotations, each to its image; refuse a file of which none can be used."""
        ids, faults, fit = set[int](), list[Fault](), 0
        for number, entry in enumerate(raw):
            key, of = _whole(entry, "id"), _whole(entry, "image_id")
            what = f"annotations[{number}]" if key is None else f"annotation {key}"
            image = images.get(-1 if of is None else of)
            if image is None:
                place, says = f"{self.path}: {what}", isinstance(entry, dict)
                why = f"is of the image {entry.get('image_id')!r}" if says else "is no mapping"
                message = f"{place} {why}, which images lack" if says else f"{place} {why}"
                self.loose.append(Fault(place, message))
                faults.append(self.loose[-1])
                continue
            if image.size == _UNKNOWN:
                continue  # the image is at fault
            try:
                if key is None or key in ids:
                    raise ValueError("has no whole number id of its own")
                image.instances.append(self._instance(entry, image.size))
                ids.add(key)
                fit += 1
            except (ValueError, TypeError, OverflowError, KeyError) as error:
                message = f"{self.path}: {what} of {image.file!r} {error}"
                culprit = str(self.folder / image.file)
                image.unfit.append(Fault(culprit, message))
                faults.append(image.unfit[-1])
        if faults and not fit:
            first = faults[0].message.removeprefix(f"{self.path}: ")
            raise UserError(
                f"{self.path}: all {len(faults):,} annotations are at fault, so that none can be "
                f"left out. The first: {first}. Correct them."
            )

    def _instance(self, entry: Mapping[str, Any], size: Size) -> _Instance:
        """Read an annotation; ValueError says what is wrong with it."""
        category, crowd = _whole(entry, "category_id"), entry.get("iscrowd", 0)
        if category is None or category not in self.label_of:
            raise ValueError(f"has the category {entry.get('category_id')!r}, which is none")
        if crowd not in (0, 1):
            raise ValueError(f"has an iscrowd of {_short(crowd)}, neither 0 nor 1")
        outline: Outline | None = None
        if self.outlined:
            if not _has_outline(entry):
                raise ValueError("has no outline (segmentation), which others have")
            outline = _outline(entry["segmentation"], size)
        box = _box(entry.get("bbox"), size)
        area = entry.get("area")
        if not isinstance(area, int | float) or not 0 <= area < math.inf:
            area = box[2] * box[3] if outline is None else mask.area(encoded(outline, size))
        return _Instance(self.label_of[category], box, float(area), bool(crowd), outline)


def _whole(entry: Any, key: str) -> int | None:
    """Return a whole number of an entry, be it 7, 7.0 or '7'; None if it has none."""
    found = entry.get(key) if isinstance(entry, dict) else None
    if isinstance(found, str) and found.strip().isdecimal():
        found = int(found)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    return found if isinstance(found, int) and abs(found) < _LARGEST else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _below(folder: Path, file: str) -> str:
    """Return a file's name below its folder, whose own name may stand in front of it."""
    name = PurePosixPath(file.replace("\\", "/"))
    for n in range(1, len(name.parts)):
        if folder.parts[-n:] == name.parts[:n] and not (folder / name).exists():
            return str(PurePosixPath(*name.parts[n:]))
    return str(name)


def _header(path: Path) -> Size:
    """Read height and width off an image's header."""
    try:
        with open_image(path) as image:
            return image.height, image.width
    except DAMAGE:
        return _UNKNOWN


def _has_outline(entry: Any) -> bool:
    """Whether an annotation has polygons or run lengths, whatever they are."""
    outline = entry.get("segmentation") if isinstance(entry, dict) else None
    return bool(outline) and outline != [[]]


def _numbers(values: Any) -> FloatArray:
    found: FloatArray = np.asarray(values, dtype=np.float64)
    return found


def _box(given: Any, size: Size) -> FloatArray:
    """Read left, top, width and height, which lie in the image."""
    try:
        box = _numbers(given)
        x, y, w, h = box.tolist()
    except (TypeError, ValueError) as error:
        raise ValueError(f"has the bbox {_short(given)}, not four numbers") from error
    if not (w >= _LEAST and h >= _LEAST):
        raise ValueError(f"has a bbox of {w:g}x{h:g} pixels")
    height, width = size
    inside = x >= -_OUTSIDE and x + w <= width + _OUTSIDE and width - x >= _LEAST <= x + w
    inside &= y >= -_OUTSIDE and y + h <= height + _OUTSIDE and height - y >= _LEAST <= y + h
    if not inside:
        raise ValueError(f"has the bbox {box.tolist()} in {width}x{height} pixels")
    return box


def _outline(given: Any, size: Size) -> Outline:
    """Read polygons, which lie in the image, or run lengths."""
    if isinstance(given, dict):
        try:
            if [*map(int, given["size"])] != [*size]:
                raise ValueError(f"of the size {given['size']}, not {[*size]} (height, width)")
            return read_region(given["counts"], size)
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise ValueError(f"has run lengths {error}") from error
    parts = [given] if isinstance(given, list) and isinstance(given[0], int | float) else given
    try:
        polygons = tuple(_numbers(part) for part in parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"has the segmentation {_short(given)}, not lists of numbers") from error
    for points in polygons:
        if points.ndim != 1 or len(points) < 6 or len(points) % 2:
            raise ValueError(f"has a polygon of {points.size} numbers; three points have six")
        right, bottom = points[::2].max() - size[1], points[1::2].max() - size[0]
        if not (points.min() >= -_OUTSIDE and right <= _OUTSIDE and bottom <= _OUTSIDE):
            raise ValueError(f"has points beyond {size[1]}x{size[0]} pixels")
    return polygons
