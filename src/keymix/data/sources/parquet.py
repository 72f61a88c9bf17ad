# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's image layout, ``image`` = {bytes, path} and ``label``, in parquet or Arrow files.

Arrow files are those of ``save_to_disk``. Labels are read at once, images only for the rows that a
split keeps; their encoded bytes are kept in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from keymix.data.decode import open_image
from keymix.data.files import existing_path, regular, split_named
from keymix.data.sources.base import Faults, Source, Table, head_digest, some
from keymix.data.specs import DataSpec
from keymix.data.streams import IntArray
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="parquet",
        argument="PATH",
        summary="Hugging Face image layout: a parquet file, a folder of train-*.parquet, "
        "test-*.parquet, validation-*.parquet, or one of save_to_disk",
        settings=("white_level",),
        on_disk=True,
    ),
)

_ROWS = 64  # images read at a time
_IMAGE_NAMES = ("image", "img", "images", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
_BASE64 = re.compile(r"data:image/|/9j/|iVBORw0|R0lGOD|UklGR|SUkq")  # how images begin in base64
_SHOWN = 60  # characters of a type

Cells: TypeAlias = tuple[Any, Any]
"""Encoded images, and their files where a row names one; arrays of Arrow."""


def open_source(argument: str, faults: Faults) -> Source:
    """Open a file, a folder of files named by split, or a folder of ``save_to_disk``."""
    files, notes = _files(existing_path("parquet", argument))
    return open_files(files, notes, f"parquet:{argument}", faults)


def open_files(
    files: Mapping[str, list[Path]], notes: list[str], spec: str, faults: Faults
) -> Source:
    """Open files that were sorted by split."""
    columns = _find_columns(files["train"][0])
    raw = {split: _Labels.read(paths, columns, faults) for split, paths in files.items()}
    if "test" in raw and raw["test"].hidden():
        del raw["test"]
        notes = [*notes, "the test split's labels are hidden (all -1), so it is not used"]
    if raw["train"].hidden():
        raise UserError(
            f"data {spec}: no row of train has a label: all are missing or -1 in column "
            f"{columns.label!r} of {files['train'][0]}. Write the classes there."
        )
    names, number = _classes(raw["train"], columns)
    tables = {
        split: _Rows(labels.files, columns.image, labels.numbers(number, faults), labels.starts)
        for split, labels in raw.items()
        if labels.values
    }
    if len(set(tables["train"].labels.tolist()) - {-1}) < 2:
        text = f"data {spec} has one class only; at least 2 are needed."
        faults.report("one class", files["train"][0], text)
    return Source(
        classes=names,
        train=tables["train"],
        val=tables.get("val"),
        test=tables.get("test"),
        notes=tuple(notes),
    )


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


def _find_columns(file: Path) -> _Columns:
    """Find the image and the label column by their types, else by the usual names."""
    schema = _schema(file)
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
        for each in schema:
            inside = [part.name for part in each.type] if pa.types.is_struct(each.type) else []
            if set(inside) & {*_IMAGE_NAMES, *_LABEL_NAMES}:
                raise UserError(
                    f"{file}: column {each.name!r} holds {some(inside)} together. Make columns "
                    "image and label of them (Dataset.flatten() of datasets does)."
                )
        what, name = ("image column", "image") if image is None else ("labels", "label")
        columns = some([f"{each.name} {str(each.type)[:_SHOWN]}" for each in schema], 10)
        raise UserError(f"{file} has no {what} (columns: {columns}). Name the column {name!r}.")
    _check_images(file, image)
    names = features.get(label, {}).get("names")
    return _Columns(image, label, tuple(map(str, names)) if names else None)


def _is_image(kind: Any) -> bool:
    """Return whether a column has the layout of Hugging Face's images, {bytes, path}."""
    return pa.types.is_struct(kind) and any(part.name == "bytes" for part in kind)


def _check_images(file: Path, column: str) -> None:
    """Refuse a column whose first cells hold text that is no image's path."""
    _, cells = next(_parts(file, column), (0, pa.nulls(0, pa.string())))
    data, paths = (half.drop_null().to_pylist() for half in _halves(file, column, cells))
    if any(_BASE64.match(str(each[:16], "latin-1")) for each in data) or any(
        map(_BASE64.match, paths)
    ):
        holds, remedy = "base64 text", "Store its bytes, base64.b64decode(text)"
    elif paths and not data and not any((file.parent / path).exists() for path in paths):
        holds = f"paths, and there is no {str(file.parent / paths[0])!r}"
        remedy = f"Put the images there, next to {file.name}, or store their bytes"
    else:
        return
    raise UserError(f"{file}: column {column!r} holds {holds}. {remedy}.")


class _Labels(NamedTuple):
    """The label column of a split's files as it stands there, and where each file starts."""

    files: list[Path]
    values: list[Any]
    starts: IntArray

    @staticmethod
    def read(files: list[Path], columns: _Columns, faults: Faults) -> _Labels:
        values: list[Any] = []
        starts, good = [0], []
        for file in files:
            try:
                values += _label_column(file, columns)
            except UserError as error:
                faults.report("unreadable", file, str(error))
                continue
            good.append(file)
            starts.append(len(values))
        return _Labels(good, values, np.asarray(starts, dtype=np.int64))

    def hidden(self) -> bool:
        return all(value is None or value == -1 for value in self.values)

    def numbers(self, number: Mapping[Any, int], faults: Faults) -> IntArray:
        """Number the classes; a label that is none is a fault, and -1 if faults are collected."""
        for row, value in enumerate(self.values):
            if value not in number:
                where = _where(self.files, self.starts, row)
                why = "missing" if value is None else f"{value!r}, no class of the training data"
                text = f"{where}: the label is {why}. Correct or remove the row."
                faults.report("bad label", where, text)
        return np.array([number.get(value, -1) for value in self.values], dtype=np.int64)


def _label_column(file: Path, columns: _Columns) -> list[Any]:
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


def _classes(train: _Labels, columns: _Columns) -> tuple[tuple[str, ...], Mapping[Any, int]]:
    """Make the names of the classes, and number the labels as they are written."""
    if names := columns.classes:
        return names, {key: i for i, name in enumerate(names) for key in (i, name)}
    labels = sorted({value for value in train.values if value is not None and value != -1})
    return tuple(map(str, labels)), {label: i for i, label in enumerate(labels)}


def _where(files: Sequence[Path], starts: IntArray, row: int) -> str:
    file = int(np.searchsorted(starts, row, side="right")) - 1
    return f"{files[file]} row {row - int(starts[file])}"


class _Rows(Table):
    """Rows of a split's files. Images are there only in what `select` and `parts` give."""

    def __init__(
        self,
        files: Sequence[Path],
        column: str,
        labels: IntArray,
        starts: IntArray,
        rows: IntArray | None = None,
        images: Cells | None = None,
    ) -> None:
        self.labels = labels
        self._files, self._column, self._starts = files, column, starts
        self._rows = np.arange(len(labels), dtype=np.int64) if rows is None else rows
        self._images = images

    def name(self, i: int) -> str:
        return _where(self._files, self._starts, int(self._rows[i]))

    def _content(self, i: int) -> bytes | Path:
        if self._images is None:
            raise RuntimeError("images are read by select(); call it first")
        data, path = (column[i].as_py() for column in self._images)
        if data is not None:
            return bytes(data)
        if path is None:
            raise ValueError("the image is empty")
        file = int(np.searchsorted(self._starts, self._rows[i], side="right")) - 1
        return self._files[file].parent / str(path)

    def open(self, i: int) -> Image.Image:
        return open_image(self._content(i), self.name(i))

    def digest(self, i: int, *, content: bool = True) -> bytes:
        stored = self._content(i)
        if isinstance(stored, Path):
            stored = (
                regular(stored).read_bytes() if content else str(stored.stat().st_size).encode()
            )
        return head_digest(len(stored), stored)

    def parts(self) -> Iterator[tuple[IntArray, Table | UserError]]:
        """Read the images in several tables, a few at a time."""
        for rows, read in self._read():
            yield rows, read if isinstance(read, UserError) else self._of(rows, read)

    def select(self, rows: IntArray) -> Table:
        halves: list[Cells] = [(pa.nulls(0, pa.large_binary()), pa.nulls(0, pa.string()))]
        for _, read in self._of(rows)._read():
            if isinstance(read, UserError):
                raise read
            halves.append(read)
        data, paths = (pa.concat_arrays(parts) for parts in zip(*halves, strict=True))
        return self._of(rows, (data, paths))

    def _of(self, rows: IntArray, images: Cells | None = None) -> _Rows:
        """Make the table of some rows, with their images if they are read."""
        labels, own = self.labels[rows], self._rows[rows]
        return _Rows(self._files, self._column, labels, self._starts, own, images)

    def _read(self) -> Iterator[tuple[IntArray, Cells | UserError]]:
        """Read the images, a few at a time; the rest of a file that cannot be read is its error."""
        for file, start, stop in zip(self._files, self._starts, self._starts[1:], strict=False):
            at, end = np.searchsorted(self._rows, [start, stop]).tolist()
            wanted = self._rows[at:end] - start
            try:
                for first, column in _parts(file, self._column, wanted):
                    inside = _between(wanted, first, first + len(column)) - first
                    if len(inside):
                        cells = _halves(file, self._column, column.take(pa.array(inside)))
                        yield np.arange(at, at + len(inside), dtype=np.int64), cells
                        at += len(inside)
            except UserError as error:
                yield np.arange(at, end, dtype=np.int64), error


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
        return pa.ipc.open_stream(pa.memory_map(str(regular(file))))
    return pq.ParquetFile(regular(file))


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


def _halves(file: Path, name: str, column: Any) -> Cells:
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
