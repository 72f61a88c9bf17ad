# SPDX-License-Identifier: Apache-2.0
"""Images with instances in the format of COCO: annotation files and folders of images.

Test is the validation split, on which results are reported; validation is split off from train.
Where no annotation of train has an outline, instances are boxes alone.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
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
_UNKNOWN = (0, 0)  # the size of an image that cannot be read
_MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""What reading an entry of another form raises."""


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
        content = whole.pop(name)
        images, of_none = _images(path, folder, content["images"])
        of_none += _annotate(images, path, content["annotations"], numbers, outlined=outlined)
        rows += [image.row(name, outlined=outlined) for image in images.values()]
        loose += of_none
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
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}. Restore it.") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(found, dict) or not isinstance(found.get(key), list):
            raise UserError(
                f"{path} has no list {key!r}: it is no annotation file of COCO's format with "
                "instances. Name other data."
            )
        if key != "annotations" and not found[key]:
            raise UserError(f"{path}: its list {key!r} is empty. Add some.")
    return found


def _categories(path: Path, raw: Sequence[Any]) -> dict[int, str]:
    """Read the categories in the order of their ids."""
    classes: dict[int, str] = {}
    for number, entry in enumerate(raw):
        try:
            key, name = _whole(entry["id"]), entry["name"].strip()
            fit = bool(name) and key not in classes
        except _MISSHAPEN:
            fit = False
        if not fit:
            why = f"is {_short(entry)}, without a name and a whole number id of its own"
            raise UserError(f"{path}: categories[{number}] {why}. Correct it.")
        classes[key] = name
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
    path: Path
    size: Size
    instances: list[_Instance] = field(default_factory=list)
    unfit: list[Fault] = field(default_factory=list)

    def row(self, split: str, *, outlined: bool) -> Row:
        """Put the annotations together."""
        found, path = self.instances, self.path
        first, _, rest = self.file.partition("/")
        name = (rest if split_named(first) else self.file).rpartition(".")[0]
        outlines = tuple(each.outline for each in found if each.outline is not None)
        instances = Instances(
            image_id=self.id,
            size=self.size,
            labels=np.array([each.label for each in found], dtype=np.int64),
            boxes=np.array([each.box for each in found], dtype=np.float64).reshape(-1, 4),
            areas=np.array([each.area for each in found], dtype=np.float64),
            crowd=np.array([each.crowd for each in found], dtype=np.bool_),
            outlines=outlines if outlined else None,
            unfit=tuple(self.unfit),
        )
        image = Encoded(path, str(path), key=self.file, placed=True)
        return Row(id=str(path), image=image, target=instances, split=split, name=name)


def _images(path: Path, folder: Path, raw: Sequence[Any]) -> tuple[dict[int, _Image], list[Fault]]:
    """Read the images by their ids, and the faults of entries that are none."""
    images: dict[int, _Image] = {}
    loose, files = list[Fault](), set[str]()
    for number, entry in enumerate(raw):
        try:
            key, file = _whole(entry["id"]), entry["file_name"]
            if not isinstance(file, str) or not file or key in images or file in files:
                raise ValueError(f"{key} and {file!r} are no id and file_name of its own")
        except _MISSHAPEN as error:
            place = f"{path}: images[{number}]"
            loose.append(Fault(place, f"{place} cannot be used: {_said(error)}"))
            continue
        files.add(file)
        file = _below(folder, file)
        try:
            size = _whole(entry["height"]), _whole(entry["width"])
        except _MISSHAPEN:
            size = _UNKNOWN
        at = folder / file
        images[key] = _Image(key, file, at, size if min(size) > 0 else _header(at))
    if not images:
        _refuse_all(path, "images", loose)
    return images, loose


def _annotate(
    images: Mapping[int, _Image],
    path: Path,
    raw: Sequence[Any],
    label_of: Mapping[int, int],
    *,
    outlined: bool,
) -> list[Fault]:
    """Read the annotations, each to its image, and go on after a fault; give those of no image."""
    ids, loose, unfit = set[int](), list[Fault](), list[Fault]()
    for number, entry in enumerate(raw):
        image, place = None, f"{path}: annotations[{number}]"
        try:
            place = f"{path}: annotation {entry.get('id')}"
            image = images.get(_whole(entry["image_id"]))
            if image is None:
                raise ValueError(f"is of the image {entry['image_id']!r}, which images lack")
            if image.size == _UNKNOWN:
                continue  # the image is at fault
            key = _whole(entry["id"])
            if key in ids:
                raise ValueError("has the id of another")
            found = _instance(entry, image.size, label_of, outlined=outlined)
        except _MISSHAPEN as error:
            if image is None:
                loose.append(Fault(place, f"{place} {_said(error)}"))
                continue
            message = f"{place} of {image.file!r} {_said(error)}"
            unfit.append(Fault(str(image.path), message))
            image.unfit.append(unfit[-1])
            continue
        ids.add(key)
        image.instances.append(found)
    if (loose or unfit) and not ids:
        _refuse_all(path, "annotations", [*loose, *unfit])
    return loose


def _refuse_all(path: Path, what: str, faults: Sequence[Fault]) -> None:
    raise UserError(
        f"{path}: all {len(faults):,} {what} are at fault, so that none can be left out. The "
        f"first: {faults[0].message.removeprefix(f'{path}: ')}. Correct them."
    )


def _instance(
    entry: Mapping[str, Any], size: Size, label_of: Mapping[int, int], *, outlined: bool
) -> _Instance:
    """Read an annotation; ValueError says what is wrong with it."""
    category, crowd, outline = _whole(entry["category_id"]), entry.get("iscrowd", 0), None
    if category not in label_of:
        raise ValueError(f"has the category {category}, which is none")
    if crowd not in (0, 1):
        raise ValueError(f"has an iscrowd of {_short(crowd)}, neither 0 nor 1")
    if outlined:
        if not _has_outline(entry):
            raise ValueError("has no outline (segmentation), which others have")
        outline = _outline(entry["segmentation"], size)
    box = _box(entry["bbox"], size)
    area = entry.get("area")
    if not isinstance(area, int | float) or not 0 <= area < math.inf:
        area = box[2] * box[3] if outline is None else mask.area(encoded(outline, size))
    return _Instance(label_of[category], box, float(area), bool(crowd), outline)


def _whole(given: Any) -> int:
    """Return a whole number, be it 7, 7.0 or '7'."""
    found = float(given) if isinstance(given, str) and given.strip().isdecimal() else given
    if not isinstance(found, int | float) or found != found // 1:
        raise ValueError(f"has {_short(given)} where a whole number is wanted")
    return int(given)


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _said(error: Exception) -> str:
    """Say what a reader found wrong."""
    return f"has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())


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


def _box(given: Any, size: Size) -> FloatArray:
    """Read left, top, width and height, which lie in the image."""
    box: FloatArray = np.asarray(given, dtype=np.float64)
    if box.shape != (4,) or not (box[2:] >= _LEAST).all():
        raise ValueError(f"has the bbox {_short(given)}, no four numbers of a rectangle")
    _refuse_outside(f"bbox {box.tolist()}", np.stack([box[:2], box[:2] + box[2:]]), size)
    return box


def _outline(given: Any, size: Size) -> Outline:
    """Read polygons, which lie in the image, or run lengths."""
    if isinstance(given, dict):
        if [*map(int, given["size"])] != [*size]:
            raise ValueError(f"has run lengths of the size {given['size']}, not {[*size]}")
        return read_region(given["counts"], size)
    parts = [given] if isinstance(given, list) and isinstance(given[0], int | float) else given
    polygons = tuple(np.asarray(part, dtype=np.float64) for part in parts)
    for points in polygons:
        if points.ndim != 1 or len(points) < 6 or len(points) % 2:
            raise ValueError(f"has a polygon of {points.size} numbers; three points have six")
        _refuse_outside("points", points.reshape(-1, 2), size)
    return polygons


def _refuse_outside(what: str, points: FloatArray, size: Size) -> None:
    """Refuse points that leave the image, and such as lie beyond one border all together."""
    far = np.array([size[1], size[0]])
    low, high = points.min(axis=0), points.max(axis=0)
    inside = (low >= -_OUTSIDE) & (high <= far + _OUTSIDE)
    if what != "points":
        inside &= (far - low >= _LEAST) & (high >= _LEAST)
    if not inside.all():
        raise ValueError(f"has the {what} outside its {size[1]}x{size[0]} pixels")
