# SPDX-License-Identifier: Apache-2.0
"""Images with instances in the format of COCO: annotation files and folders of images.

Test is the validation split, on which results are reported; validation is split off from train.
An annotation file is read once and kept as flat arrays; masks are made when they are needed.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.detection.outlines import Outlines, read_runs
from keymix.data.detection.table import Annotations, InstanceSource, InstanceTable
from keymix.data.files import existing_path, regular
from keymix.data.sources.base import Fault, Faults, some
from keymix.data.specs import DataSpec
from keymix.data.streams import IntArray
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="coco",
        argument="PATH",
        summary="PATH/annotations/instances_{train,val}*.json and the folders of images that they "
        "name; test is val",
        task="detection",
        target="boxes",
        on_disk=True,
    ),
)

_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_FILE = "_annotations.coco.json"
_LAYOUT = (
    "Arrange the data as annotations/instances_train2017.json with the images in train2017/, and "
    f"likewise for val; or as train.json with train/; or as train/{_FILE} next to its images."
)
_OUTSIDE = 1.0  # pixels by which a box or a polygon may leave its image: it is cut off
_LEAST = 1e-3  # pixels of the side of a box, below which it has none
_IDS = 1 << 63
_KEYS = ("id", "category_id", "bbox", "area", "segmentation")


def open_source(argument: str, faults: Faults) -> InstanceSource:
    """Open ``PATH`` with annotation files for train and, optionally, val and test.

    ``PATH/annotations/instances_train2017.json`` has its images in ``PATH/train2017/`` or
    ``PATH/images/train2017/``. Simpler names serve too: ``PATH/train.json`` with ``PATH/train/``,
    or ``PATH/train/_annotations.coco.json`` next to its images.
    """
    root = existing_path("coco", argument)
    places = {name: place for name in _SPLITS if (place := _place(root, name)) is not None}
    if "train" not in places:
        raise UserError(f"data coco:{argument}: {root} has no annotations to learn from. {_LAYOUT}")
    classes: dict[int, str] = {}
    tables, loose = {}, list[Fault]()
    for name, (path, folder) in places.items():
        reader = _Reader(path, folder, classes)
        tables[name] = InstanceTable(reader.read())
        classes, loose = reader.classes, loose + reader.loose
    if faults.collect:
        faults.found += loose
    return InstanceSource(
        classes=_names(classes),
        train=tables["train"],
        val=tables.get("val"),
        test=tables.get("test"),
        loose=tuple(loose),
    )


def _files(root: Path, split: str) -> list[tuple[Path, list[Path]]]:
    """List the annotation files that may be a split's, each with the folders of its images."""
    found: list[tuple[Path, list[Path]]] = []
    notes = root / "annotations"
    for name in _SPLITS[split]:
        for path in sorted(notes.glob(f"instances_{name}*.json")):
            stem = path.stem.removeprefix("instances_")
            if name != "val" or not stem.startswith("valid"):
                found.append((path, [root / stem, root / "images" / stem]))
        for path in (notes / f"{name}.json", root / f"{name}.json"):
            places = [root / name, root / "images" / name, root / "images"]
            found += [(path, places)] if path.is_file() else []
        path = root / name / _FILE
        found += [(path, [root / name])] if path.is_file() else []
    return found


def _place(root: Path, split: str) -> tuple[Path, Path] | None:
    """Find the annotation file of a split and the folder of its images."""
    found = _files(root, split)
    if not found:
        return None
    if len(found) > 1:
        names = some([str(path.relative_to(root)) for path, _ in found])
        raise UserError(f"{root} has several annotation files for {split}: {names}. Keep one.")
    path, folders = found[0]
    for folder in folders:
        if folder.is_dir():
            return path, folder
    wanted = " nor ".join(f"{folder}/" for folder in folders)
    raise UserError(f"{path}: there is no {wanted} with its images. {_LAYOUT}")


def _names(classes: Mapping[int, str]) -> tuple[str, ...]:
    """Name classes in the order of their ids; those of one name get their ids too."""
    often = Counter(classes.values())
    return tuple(
        f"{name} ({key})" if often[name] > 1 else name for key, name in sorted(classes.items())
    )


@dataclass
class _Columns:
    """What is read of annotations, one after the other."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    labels: array[int] = field(default_factory=lambda: array("q"))
    boxes: array[float] = field(default_factory=lambda: array("d"))
    areas: array[float] = field(default_factory=lambda: array("d"))
    crowd: array[int] = field(default_factory=lambda: array("b"))
    points: array[float] = field(default_factory=lambda: array("d"))
    polygons: array[int] = field(default_factory=lambda: array("q", [0]))
    first_polygon: array[int] = field(default_factory=lambda: array("q", [0]))
    runs: array[int] = field(default_factory=lambda: array("q"))
    first_run: array[int] = field(default_factory=lambda: array("q", [0]))


class _BadError(Exception):
    """An annotation that cannot be read: the kind of its fault, and what is wrong with it."""


class _Reader:
    """Reads an annotation file, and goes on after each fault."""

    def __init__(self, path: Path, folder: Path, classes: Mapping[int, str]) -> None:
        self.path, self.folder = path, folder
        self.classes = dict(classes)
        self.loose: list[Fault] = []
        self.faults: dict[int, list[Fault]] = {}
        self.unfit: dict[int, dict[int, list[Fault]]] = {}
        self.files: list[str] = []
        self.columns = _Columns()

    def read(self) -> Annotations:
        """Read the file, or refuse what is no such file at all."""
        whole = self._whole()
        self._categories(whole["categories"])
        ids, sizes = self._images(whole["images"])
        if not len(ids):
            raise UserError(f"{self.path}: none of its images can be read. Correct it.")
        rows = self._annotations(whole["annotations"], ids, sizes)
        columns = self.columns
        made = Annotations(
            folder=self.folder,
            files=self.files,
            image_ids=ids,
            sizes=sizes,
            first=np.searchsorted(rows, np.arange(len(ids) + 1)).astype(np.int64),
            ids=_array(columns.ids),
            labels=_array(columns.labels),
            boxes=_array(columns.boxes).reshape(-1, 4),
            areas=_array(columns.areas),
            crowd=_array(columns.crowd).astype(np.bool_),
            outlines=Outlines(
                points=_array(columns.points),
                polygons=_array(columns.polygons),
                first_polygon=_array(columns.first_polygon),
                runs=_array(columns.runs),
                first_run=_array(columns.first_run),
            ),
            category_ids=tuple(sorted(self.classes)),
            faults=self.faults,
            unfit=self.unfit,
        )
        for a, kind, why in self._numbers(made, rows):
            fault = self._fault(int(rows[a]), kind, f"annotation {made.ids[a]}", why)
            self.unfit.setdefault(int(rows[a]), {}).setdefault(a, []).append(fault)
        return made

    def _whole(self) -> dict[str, list[Any]]:
        """Parse the file and check its outermost form."""
        try:
            found: dict[str, list[Any]] = json.loads(
                regular(self.path).read_text(encoding="utf-8-sig")
            )
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}. Restore it.") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} is no JSON: {error}. Restore it.") from error
        for key in ("images", "annotations", "categories"):
            if not isinstance(found, dict) or not isinstance(found.get(key), list):
                raise UserError(
                    f"{self.path} has no list {key!r}: it is no annotation file of COCO's format "
                    "with instances. Name other data."
                )
            if key != "annotations" and not found[key]:
                raise UserError(f"{self.path}: its list {key!r} is empty. Add some.")
        return found

    def _entry(self, number: int, what: str, kind: str, why: str) -> None:
        """Report an entry that belongs to no image."""
        place = f"{self.path}: {what}[{number}]"
        self.loose.append(Fault(kind, f"{place} {why}", place))

    def _fault(self, row: int, kind: str, what: str, why: str) -> Fault:
        """Say what is wrong with an image or one of its annotations."""
        file = self.files[row]
        message = f"{self.path}: {what} of {file!r} {why}" if file else f"{self.path}: {what} {why}"
        return Fault(kind, message, str(self.folder / file) if file else message)

    def _categories(self, raw: list[Any]) -> None:
        """Read the categories; those of train hold for all splits."""
        train, own = dict(self.classes), dict[int, str]()
        for number, entry in enumerate(raw):
            key = _integer(entry, "id")
            name = entry.get("name") if isinstance(entry, dict) else None
            if key is None or not isinstance(name, str) or not name.strip():
                self._entry(number, "categories", "bad entry", "has no whole number id and name")
            elif key in own:
                self._entry(number, "categories", "duplicate id", f"has the id {key} of another")
            elif train and train.get(key) != name.strip():
                known = f"is {train[key]!r}" if key in train else "is none"
                why = f"is {key}, {name!r}, which {known} in train"
                self._entry(number, "categories", "other categories", why)
            else:
                own[key] = name.strip()
        if not train and not own:
            raise UserError(f"{self.path}: none of its categories can be read. Correct it.")
        self.classes = train or own

    def _images(self, raw: list[Any]) -> tuple[IntArray, IntArray]:
        """Read the images: their ids, and heights and widths."""
        ids: dict[int, None] = {}
        sizes, seen = [], set[str]()
        for number, entry in enumerate(raw):
            key, file = _integer(entry, "id"), None
            height, width = _integer(entry, "height"), _integer(entry, "width")
            if isinstance(entry, dict):
                file = entry.get("file_name")
            if key is None or not isinstance(file, str) or not file or not height or not width:
                why = "has no whole number id, file_name, height and width"
                self._entry(number, "images", "bad entry", why)
            elif height < 1 or width < 1:
                self._entry(number, "images", "bad entry", f"has the size {width}x{height}")
            elif key in ids:
                self._entry(number, "images", "duplicate id", f"has the id {key} of another")
            elif file in seen:
                self._entry(number, "images", "file listed twice", f"is {file!r} once more")
            else:
                seen.add(file)
                row = len(ids)
                ids[key] = None
                sizes.append((height, width))
                inside = _inside(file)
                self.files.append(file if inside else "")
                if not inside:
                    fault = self._fault(row, "bad file name", f"images[{number}]", f"is {file!r}")
                    self.faults[row] = [fault]
        return np.array([*ids], dtype=np.int64), np.array(sizes, dtype=np.int64).reshape(-1, 2)

    def _annotations(self, raw: list[Any], ids: IntArray, sizes: IntArray) -> IntArray:
        """Read the annotations in the order of their images; their images, ascending."""
        row_of = {key: row for row, key in enumerate(ids.tolist())}
        rows = np.full(len(raw), -1, dtype=np.int64)
        for number, entry in enumerate(raw):
            image = _integer(entry, "image_id")
            if not isinstance(entry, dict):
                self._entry(number, "annotations", "bad entry", "is no mapping")
            elif image is None:
                self._entry(number, "annotations", "missing key", "has no whole number image_id")
            elif image not in row_of:
                why = f"is of the image {image}, which images lack"
                self._entry(number, "annotations", "unknown image", why)
            else:
                rows[number] = row_of[image]
        label_of = {key: label for label, key in enumerate(sorted(self.classes))}
        taken = []
        for number in np.argsort(rows, kind="stable").tolist():
            row = int(rows[number])
            if row < 0:
                continue
            entry, raw[number] = raw[number], None  # half of the memory that the text took
            size = sizes[row].tolist()
            try:
                self._take(entry, label_of, (size[0], size[1]))
                taken.append(row)
            except _BadError as error:
                key = _integer(entry, "id")
                what = f"annotations[{number}]" if key is None else f"annotation {key}"
                fault = self._fault(row, error.args[0], what, error.args[1])
                self.unfit.setdefault(row, {})[-1 - number] = [fault]
        return np.array(taken, dtype=np.int64)

    def _take(self, entry: dict[str, Any], label_of: Mapping[int, int], size: Any) -> None:
        """Read one annotation into the columns, or raise and leave them as they are."""
        columns = self.columns
        key, category = _integer(entry, "id"), _integer(entry, "category_id")
        lacking = [name for name in _KEYS if name not in entry]
        if lacking:
            raise _BadError("missing key", f"has no {', '.join(lacking)}")
        if key is None or category is None:
            raise _BadError("bad entry", "has an id or category_id that is no whole number")
        if category not in label_of:
            raise _BadError("unknown category", f"has the category {category}, which is none")
        if entry.get("iscrowd", 0) not in (0, 1):
            raise _BadError("bad entry", "has an iscrowd that is neither 0 nor 1")
        box, area = _floats(entry["bbox"]), _floats([entry["area"]])
        if box is None or len(box) != 4 or area is None:
            raise _BadError("bad number", "has a bbox that is not four numbers, or no number area")
        outline = entry["segmentation"]
        polygons, runs = [], array("q")
        if isinstance(outline, dict):
            runs = _runs(outline, size)
        elif isinstance(outline, list) and outline:
            polygons = [_polygon(part) for part in outline]
        else:
            raise _BadError("no outline", "has a segmentation without polygons and run lengths")
        columns.ids.append(key)
        columns.labels.append(label_of[category])
        columns.boxes.extend(box)
        columns.areas.extend(area)
        columns.crowd.append(int(entry.get("iscrowd", 0)))
        for part in polygons:
            columns.points.extend(part)
            columns.polygons.append(len(columns.points))
        columns.first_polygon.append(len(columns.polygons) - 1)
        columns.runs.extend(runs)
        columns.first_run.append(len(columns.runs))

    def _numbers(self, made: Annotations, rows: IntArray) -> Iterator[tuple[int, str, str]]:
        """Find the annotations whose numbers cannot be: which, the kind of fault, and why."""
        height, width = made.sizes[rows].T
        with np.errstate(invalid="ignore", over="ignore"):
            x, y, w, h = made.boxes.T
            most = (width + 2 * _OUTSIDE) * (height + 2 * _OUTSIDE)
            finite = np.isfinite(made.boxes).all(1) & (made.areas >= 0) & (made.areas <= most)
            inside_w = np.minimum(x + w, width) - np.maximum(x, 0)
            inside_h = np.minimum(y + h, height) - np.maximum(y, 0)
            out = (x < -_OUTSIDE) | (y < -_OUTSIDE)
            out |= (x + w > width + _OUTSIDE) | (y + h > height + _OUTSIDE)
            empty = (w < _LEAST) | (h < _LEAST)
            out |= (inside_w < _LEAST) | (inside_h < _LEAST)
        for a in np.flatnonzero(~finite).tolist():
            box, area = made.boxes[a].tolist(), float(made.areas[a])
            yield a, "bad number", f"has the bbox {box} and the area {area:g}"
        for a in np.flatnonzero(finite & empty).tolist():
            yield a, "empty box", f"has a bbox of {w[a]:g}x{h[a]:g} pixels"
        for a in np.flatnonzero(finite & ~empty & out).tolist():
            box = made.boxes[a].tolist()
            yield a, "box outside the image", f"has the bbox {box} in {width[a]}x{height[a]} pixels"
        yield from self._polygons(made, rows)
        _, first = np.unique(made.ids, return_index=True)
        for a in np.setdiff1d(np.arange(len(made.ids)), first).tolist():
            yield a, "duplicate id", "has the id of another annotation"

    def _polygons(self, made: Annotations, rows: IntArray) -> Iterator[tuple[int, str, str]]:
        """Find the annotations whose polygons are not numbers, or leave their image."""
        outlines = made.outlines
        if not len(outlines.points):
            return
        of = np.repeat(np.arange(len(rows)), np.diff(outlines.first_polygon))
        starts = outlines.polygons[:-1] // 2
        points = outlines.points.reshape(-1, 2)
        most = made.sizes[rows[of]][:, ::-1] + _OUTSIDE
        least, largest = np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)
        odd = ~np.isfinite(largest - least).all(1)  # a number that is not makes both so
        out = ~odd & ((least < -_OUTSIDE) | (largest > most)).any(1)
        for a in np.unique(of[odd]).tolist():
            yield a, "bad number", "has a polygon with numbers that are not finite"
        for a in np.unique(of[out]).tolist():
            size = made.sizes[rows[a]].tolist()
            yield a, "polygon outside the image", f"has points beyond {size[1]}x{size[0]} pixels"


def _integer(entry: Any, key: str) -> int | None:
    """Return a whole number of an entry; None if it has none."""
    found = entry.get(key) if isinstance(entry, dict) else None
    return found if type(found) is int and -_IDS <= found < _IDS else None


def _inside(file: str) -> bool:
    """Whether a file's name stays in the folder that it is below, on every system."""
    anchored = PurePosixPath(file).is_absolute() or PureWindowsPath(file).anchor
    return not anchored and "\0" not in file and ".." not in PureWindowsPath(file).parts


def _floats(values: Any) -> array[float] | None:
    """Take a list of numbers; None if it is none."""
    try:
        return array("d", values) if isinstance(values, list) else None
    except (TypeError, OverflowError):
        return None


def _polygon(part: Any) -> array[float]:
    points = _floats(part)
    if points is None:
        raise _BadError("bad number", "has a polygon that is no list of numbers")
    if len(points) < 6 or len(points) % 2:
        why = f"has a polygon of {len(points)} numbers; three points have six"
        raise _BadError("bad polygon", why)
    return points


def _runs(outline: dict[str, Any], size: tuple[int, int]) -> array[int]:
    """Read run lengths, compressed or not, that cover an image of a height and width."""
    stated, counts = outline.get("size"), outline.get("counts")
    if stated != [*size]:
        why = f"has run lengths of the size {stated!r}, not {[*size]!r} (height, width)"
        raise _BadError("bad run lengths", why[:200])
    runs: IntArray | None = None
    if isinstance(counts, str):
        runs = read_runs(counts)
    elif isinstance(counts, list) and all(type(n) is int and 0 <= n < _IDS for n in counts):
        runs = np.array(counts, dtype=np.int64)
    if runs is None or (len(runs) and runs.min() < 0):
        raise _BadError("bad run lengths", "has run lengths that cannot be read")
    covered = sum(runs.tolist())
    if covered != size[0] * size[1]:
        why = f"has run lengths of {covered} pixels in all, and its image has {size[0] * size[1]}"
        raise _BadError("bad run lengths", why)
    return array("q", runs.tolist())


def _array(values: array[Any]) -> NDArray[Any]:
    """Take numbers as they lie in memory; they may be half of a gigabyte."""
    return np.frombuffer(values, dtype=values.typecode) if values else np.zeros(0, values.typecode)
