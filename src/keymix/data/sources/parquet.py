# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's image layout, ``image`` = {bytes, path} and ``label``, in parquet or Arrow files.

Arrow files are those of ``save_to_disk``. Labels are read at once, images only for the rows that a
split keeps; their encoded bytes are kept in memory.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from keymix.data.decode import Encoded
from keymix.data.files import existing_path, split_named
from keymix.data.sample import SPLITS, Faults, Row, Source, some
from keymix.data.specs import source
from keymix.data.streams import IntArray
from keymix.errors import UserError

_ROWS = 64  # images read at a time
_IMAGE_NAMES = ("image", "img", "images", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
_SHOWN = 60  # characters of a type


@source(
    "parquet",
    argument="PATH",
    summary="Hugging Face image layout: a parquet file, a folder of train-*.parquet, "
    "test-*.parquet, validation-*.parquet, or one of save_to_disk",
    settings=("white_level",),
    on_disk=True,
)
def open_parquet(argument: str, faults: Faults) -> Source:
    """Open a file, a folder of files named by split, or a folder of ``save_to_disk``."""
    files, notes = _files(existing_path("parquet", argument))
    return open_files(files, notes, f"parquet:{argument}", faults)


def open_files(
    files: Mapping[str, list[Path]], notes: list[str], spec: str, faults: Faults
) -> Source:
    """Open files that were sorted by split."""
    first = files["train"][0]
    columns = find_columns(_schema(first), first)
    given: dict[str, dict[Path, list[Any]]] = {split: {} for split in SPLITS if split in files}
    for split, of in given.items():
        for file in files[split]:
            try:
                of[file] = _labels(file, columns)
            except UserError as error:
                faults.report(file, str(error).removeprefix(f"{file} "))
    if "test" in given and _unlabelled(given["test"]):
        del given["test"]
        notes = [*notes, "the test split's labels are hidden (all -1), so it is not used"]
    if _unlabelled(given["train"]):
        raise UserError(
            f"data {spec}: no row of train has a label: all are missing or -1 in column "
            f"{columns.label!r} of {first}. Write the classes there."
        )
    names, number = _classes(given["train"], columns)
    parts = [(split, file, labels) for split, of in given.items() for file, labels in of.items()]
    for _, file, labels in parts:
        for row, label in enumerate(labels):
            if label not in number:
                why = "missing" if label is None else f"{label!r}, no class of the training data"
                why = f"the label is {why}. Correct or remove the row."
                faults.report(f"{file} row {row}", why)
            labels[row] = number.get(label, -1)
    if len({label for of in given["train"].values() for label in of} - {-1}) < 2:
        faults.report(first, f"data {spec} has one class only; at least 2 are needed.")
    every = np.array([label for *_, labels in parts for label in labels], dtype=np.int64)
    rows = _Rows(
        [(split, file) for split, file, _ in parts],
        [0, *accumulate(len(labels) for *_, labels in parts)],
        columns.image,
        every,
        np.arange(len(every), dtype=np.int64),
    )
    return Source(rows=rows, classes=names, notes=tuple(notes))


def _files(path: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """Sort the files by split, and note what is done with those of none; train is always there."""
    if path.is_file():
        return {"train": [path]}, []
    found = (
        [(file.parent.name, file) for file in path.glob("*/data-*.arrow")]
        or [("train", file) for file in path.glob("data-*.arrow")]
        or [(re.split("[-_.]", file.name)[0], file) for file in path.glob("*.parquet")]
        or [(re.split("[-_.]", file.name)[0], file) for file in path.glob("data/*.parquet")]
    )
    splits: dict[str, list[Path]] = {}
    for name, file in sorted(found, key=lambda each: each[1]):
        splits.setdefault(split_named(name), []).append(file)
    other = splits.pop("", [])
    if other and not splits:
        return {"train": other}, ["no file is named by split: all of them taken as train"]
    if "train" not in splits:
        there = f"only {some([file.name for _, file in found])}" if found else "no other files"
        raise UserError(
            f"data parquet:{path}: no train-*.parquet there, {there}. Name the training files so, "
            "or give one file."
        )
    return splits, [f"{len(other)} files not named by split are left out"] if other else []


class _Columns(NamedTuple):
    """Names of a file's columns."""

    image: str
    label: str
    classes: tuple[str, ...] | None  # by their numbers; None where the file does not say


def find_columns(schema: Any, file: str | Path) -> _Columns:
    """Find the image and the label column by their types, else by the usual names."""
    info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
    features = info.get("features", {})

    def pick(kind: str, usual: Sequence[str]) -> str | None:
        typed = [name for name in schema.names if features.get(name, {}).get("_type") == kind] or [
            each.name for each in schema if kind == "Image" and _is_image(each.type)
        ]
        named = (name for names in (typed, schema.names) for name in usual if name in names)
        return next(iter((*named, *typed)), None)

    image, label = pick("Image", _IMAGE_NAMES), pick("ClassLabel", _LABEL_NAMES)
    if image is None or label is None:
        what, name = ("image column", "image") if image is None else ("labels", "label")
        columns = some([f"{each.name} {str(each.type)[:_SHOWN]}" for each in schema], 10)
        raise UserError(f"{file} has no {what} (columns: {columns}). Name the column {name!r}.")
    names = features.get(label, {}).get("names")
    return _Columns(image, label, tuple(map(str, names)) if names else None)


def _is_image(kind: Any) -> bool:
    """Return whether a column has the layout of Hugging Face's images, {bytes, path}."""
    return pa.types.is_struct(kind) and any(part.name == "bytes" for part in kind)


def _labels(file: Path, columns: _Columns) -> list[Any]:
    """Read a file's labels as they stand there."""
    names = _schema(file).names
    for name in (columns.image, columns.label):
        if name not in names:
            raise UserError(f"{file} has no column {name!r}, which other files have.")
    parts = _parts(file, columns.label, at_once=1 << 14)
    values = [value for _, part in parts for value in part.to_pylist()]
    bad = next((value for value in values if not isinstance(value, int | str | None)), None)
    if bad is not None:
        raise UserError(
            f"{file}: labels in column {columns.label!r} are such as {str(bad)[:_SHOWN]!r}; a "
            "class is a whole number or text. Write them so."
        )
    return values


def _unlabelled(of: Mapping[Path, list[Any]]) -> bool:
    """Return whether no row of a split's files has a label."""
    return all(label is None or label == -1 for labels in of.values() for label in labels)


def _classes(
    train: Mapping[Path, list[Any]], columns: _Columns
) -> tuple[tuple[str, ...], Mapping[Any, int]]:
    """Make the names of the classes, and number the labels as they are written."""
    if names := columns.classes:
        return names, {key: i for i, name in enumerate(names) for key in (i, name)}
    labels = sorted({label for of in train.values() for label in of} - {None, -1})
    return tuple(map(str, labels)), {label: i for i, label in enumerate(labels)}


@dataclass(frozen=True, eq=False, repr=False)
class _Rows(Sequence[Row]):
    """Rows of files, built when they are asked for; `select` reads their images."""

    parts: Sequence[tuple[str, Path]]  # split and file of each part
    starts: list[int]  # number of each part's first row, and of all rows
    column: str  # of the images
    labels: IntArray  # of all rows
    chosen: IntArray  # which of all rows these are
    images: tuple[Any, Any] | None = None  # of these, encoded, and their files; Arrow's arrays

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: Any) -> Any:
        row = int(self.chosen[i])
        part = bisect_right(self.starts, row) - 1
        split, file = self.parts[part]
        name = f"{file} row {row - self.starts[part]}"
        image: Callable[[], Tensor] = _unread
        if self.images is not None:
            data, path = (half[i].as_py() for half in self.images)
            if data is None:
                data = b"" if path is None else file.parent / path
            image = Encoded(data, name)
        return Row(id=name, image=image, target=int(self.labels[row]), split=split)

    def select(self, index: IntArray) -> _Rows:
        """Keep some rows, ascending, and read their images."""
        rows = self.chosen[index]
        halves = [(pa.nulls(0, pa.large_binary()), pa.nulls(0, pa.string()))]
        for (_, file), start, stop in zip(self.parts, self.starts, self.starts[1:], strict=False):
            wanted = _between(rows, start, stop) - start
            for first, cells in _parts(file, self.column, wanted) if len(wanted) else ():
                inside = _between(wanted, first, first + len(cells)) - first
                if len(inside):
                    halves.append(_halves(file, self.column, cells.take(pa.array(inside))))
                if first + len(cells) > wanted[-1]:
                    break
        data, paths = (pa.concat_arrays(of) for of in zip(*halves, strict=True))
        return replace(self, chosen=rows, images=(data, paths))


def _unread() -> Tensor:
    raise RuntimeError("images are read by select(); call it first")


def _between(rows: IntArray, start: int, end: int) -> IntArray:
    first, last = np.searchsorted(rows, [start, end])
    return rows[first:last]


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        kind = "Arrow" if file.suffix == ".arrow" else "parquet"
        reason = f"{file} is not a readable {kind} file: {text.splitlines()[0]}"
        raise UserError(reason) from error


def _opened(file: Path) -> Any:
    if file.suffix == ".arrow":
        return pa.ipc.open_stream(pa.memory_map(str(file)))
    return pq.ParquetFile(file)


def _schema(file: Path) -> Any:
    with _readable(file):
        opened = _opened(file)
        return opened.schema if file.suffix == ".arrow" else opened.schema_arrow


def _parts(
    file: Path, column: str, wanted: IntArray | None = None, *, at_once: int = _ROWS
) -> Iterator[tuple[int, Any]]:
    """Read a column, a few rows at a time, in row groups with wanted rows (None for all).

    Yields the number of the first row, and the cells.
    """
    start = 0
    with _readable(file):
        opened = _opened(file)
        if file.suffix == ".arrow":
            for batch in opened:
                for at in range(0, len(batch), at_once):
                    yield start + at, batch.column(column).slice(at, at_once)
                start += len(batch)
            return
        for group in range(opened.num_row_groups):
            end = start + opened.metadata.row_group(group).num_rows
            if wanted is None or len(_between(wanted, start, end)):
                for batch in opened.iter_batches(at_once, row_groups=[group], columns=[column]):
                    yield start, batch.column(0)
                    start += len(batch)
            start = end


def _halves(file: Path, name: str, column: Any) -> tuple[Any, Any]:
    """Make bytes and path of an image column: a struct of both, plain bytes, or plain paths."""
    kind, nothing = column.type, pa.nulls(len(column))
    data = path = nothing
    if _is_image(kind):
        batch = pa.RecordBatch.from_struct_array(column)
        data, path = batch["bytes"], batch["path"] if "path" in batch.schema.names else nothing
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        data = column
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        path = column
    else:
        raise UserError(
            f"{file}: the image column {name!r} holds {str(kind)[:_SHOWN]}. Store encoded images, "
            "as bytes or {bytes, path}."
        )
    return data.cast(pa.large_binary()), path.cast(pa.string())
