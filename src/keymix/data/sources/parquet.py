# SPDX-License-Identifier: Apache-2.0
"""Parquet files in Hugging Face's image layout: ``image`` = {bytes, path}, ``label``.

Labels are read at once, images only for the rows that a split keeps; their encoded bytes are held
in memory. Columns are found from the features that ``datasets`` writes into the schema's metadata
(https://huggingface.co/docs/datasets/image_dataset), or else by their usual names.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from keymix.data.sources.base import Faults, Source, Table, head_digest, some
from keymix.data.specs import existing_path
from keymix.data.streams import IntArray
from keymix.errors import UserError

_IMAGE_NAMES = ("image", "img", "images", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
_SPLIT_FILE = re.compile(r"(train|test|validation|valid|val)(?:[-_.].*)?\.parquet")


@dataclass(frozen=True)
class _Columns:
    image: str
    label: str
    names: tuple[str, ...] | None  # ClassLabel's


def open_source(argument: str, faults: Faults) -> Source:
    """Open a parquet file, or a folder of parquet files named by split.

    Raises:
        UserError: If there are no files, no image column or no labels; on an unreadable file, one
            class only or a label out of range, unless ``faults`` collects these.
    """
    files, notes = _files(existing_path("parquet", argument))
    return open_files(files, notes, f"parquet:{argument}", faults)


def open_files(
    files: Mapping[str, list[Path]], notes: list[str], spec: str, faults: Faults
) -> Source:
    """Open parquet files that were sorted by split.

    Args:
        files: Those of ``train``, and of ``validation`` and ``test`` where there are any.
        notes: What a reader of a result should know about them.
        spec: The data spec, for messages.
        faults: What to do about faults.

    Raises:
        UserError: As `open_source` does.
    """
    columns = _columns(files["train"][0])
    raw = {split: _Labels.read(paths, columns, faults) for split, paths in files.items()}
    if "test" in raw and raw["test"].hidden():
        del raw["test"]
        notes = [*notes, "the test split's labels are hidden (all -1), so it is not used"]
    if not raw["train"].values:
        raise UserError(f"data {spec} has no rows in {files['train'][0]}.")
    classes, number = _classes(raw["train"], columns, faults)
    tables = {
        split: _ParquetTable(labels.files, columns.image, number(labels), labels.starts)
        for split, labels in raw.items()
        if labels.values
    }
    absent = np.setdiff1d(np.arange(len(classes)), tables["train"].labels)
    if len(classes) - len(absent) < 2:
        faults.tell(
            "one class",
            files["train"][0],
            f"data {spec} has one class only; at least 2 are needed.",
        )
    if len(absent):
        notes = [*notes, f"classes without training images: {some([classes[i] for i in absent])}"]
    return Source(
        classes=classes,
        train=tables["train"],
        val=tables.get("validation"),
        test=tables.get("test"),
        notes=tuple(notes),
    )


def _files(path: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """Sort parquet files by split: train always, validation and test where there are files."""
    if path.is_file():
        return {"train": [path]}, []
    for folder in (path, path / "data"):
        found = sorted(folder.glob("*.parquet"))
        if not found:
            continue
        splits: dict[str, list[Path]] = {}
        for file in found:
            match = _SPLIT_FILE.fullmatch(file.name)
            split = match.group(1) if match else "other"
            splits.setdefault("validation" if split.startswith("val") else split, []).append(file)
        other = splits.pop("other", [])
        if "train" in splits:
            left = [f"{len(other)} parquet files not named by split are left out"] if other else []
            return splits, left
        if other and not splits:
            return {"train": other}, ["no file is named by split: all of them taken as train"]
        raise UserError(
            f"data parquet:{path}: no train-*.parquet beside {some([f.name for f in found])}. "
            "Rename the training files, or give one file."
        )
    raise UserError(f"data parquet:{path}: no *.parquet files there, nor in its folder data.")


def _columns(file: Path) -> _Columns:
    """Find the image and the label column of a file from its schema."""
    schema = _opened(file).schema_arrow
    features: dict[str, Any] = {}
    try:
        info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = info.get("info", {}).get("features", {})
    except (ValueError, AttributeError):  # another writer's metadata: go by the names
        pass

    def typed(kind: str) -> list[str]:
        return [
            name
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == kind and name in schema.names
        ]

    images = typed("Image") or [field.name for field in schema if _is_image_struct(field.type)]
    image = _pick(images, schema.names, _IMAGE_NAMES)
    label = _pick(typed("ClassLabel"), schema.names, _LABEL_NAMES)
    seen = some(schema.names, 10)
    if image is None:
        raise UserError(f"{file} has no image column (columns: {seen}). Name it 'image'.")
    if label is None:
        raise UserError(
            f"{file} has no labels (columns: {seen}). Classification needs a column 'label'."
        )
    names = features.get(label, {}).get("names") if isinstance(features.get(label), dict) else None
    return _Columns(image, label, tuple(str(n) for n in names) if names else None)


def _is_image_struct(kind: Any) -> bool:
    """Tell whether a column has the layout of Hugging Face's images, {bytes, path}."""
    if not pa.types.is_struct(kind):
        return False
    return {"bytes", "path"} <= {kind.field(i).name for i in range(kind.num_fields)}


def _pick(typed: list[str], present: Sequence[str], usual: Sequence[str]) -> str | None:
    """Choose a column: the usual name among those of the right type, else the first of the type."""
    for candidates in (typed, list(present)):
        for name in usual:
            if name in candidates:
                return name
    return typed[0] if typed else None


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file} is not a readable parquet file: {reason}") from error


def _opened(file: Path) -> Any:
    with _readable(file):
        return pq.ParquetFile(file)


@dataclass(frozen=True)
class _Labels:
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
                faults.tell("unreadable file", file, str(error))
                continue
            good.append(file)
            starts.append(len(values))
        return _Labels(good, values, np.asarray(starts, dtype=np.int64))

    def where(self, row: int) -> str:
        return _where(self.files, self.starts, row)

    def hidden(self) -> bool:
        return bool(self.values) and all(v is None or v == -1 for v in self.values)


def _label_column(file: Path, columns: _Columns) -> list[Any]:
    parquet = _opened(file)
    for name in (columns.image, columns.label):
        if name not in parquet.schema_arrow.names:
            raise UserError(f"{file} has no column {name!r}, which other files have.")
    with _readable(file):
        return list(parquet.read(columns=[columns.label]).column(0).to_pylist())


def _where(files: Sequence[Path], starts: IntArray, row: int) -> str:
    file = int(np.searchsorted(starts, row, side="right")) - 1
    return f"{files[file]} row {row - int(starts[file])}"


def _classes(
    train: _Labels, columns: _Columns, faults: Faults
) -> tuple[tuple[str, ...], Callable[[_Labels], IntArray]]:
    """Make the names of the classes, and the function from labels as written to class numbers.

    A bad label is a fault; where faults are collected, its number is -1.
    """
    names = columns.names
    if names is not None:
        to_number: dict[Any, int] = {i: i for i in range(len(names))}
        to_number.update({name: i for i, name in enumerate(names)})
    else:
        distinct = {v for v in train.values if isinstance(v, int | str) and v != -1}
        if len({type(v) for v in distinct}) > 1:
            raise UserError(f"{train.files[0]}: column {columns.label!r} mixes numbers and text.")
        to_number = {value: i for i, value in enumerate(sorted(distinct))}
        names = tuple(str(value) for value in to_number)

    def number(labels: _Labels) -> IntArray:
        out = np.empty(len(labels.values), dtype=np.int64)
        for row, value in enumerate(labels.values):
            known = to_number.get(value) if isinstance(value, int | str) else None
            if known is None:
                _bad_label(labels, columns, row, faults)
            out[row] = -1 if known is None else known
        return out

    return names, number


def _bad_label(labels: _Labels, columns: _Columns, row: int, faults: Faults) -> None:
    value, where = labels.values[row], labels.where(row)
    why = "missing" if value is None else f"{value!r}, which is no class of the training data"
    faults.tell(
        "bad label", where, f"{where}: {columns.label!r} is {why}. Correct or remove the row."
    )


class _ParquetTable(Table):
    """Rows of a split's files. Images are there only after `select`, which reads them."""

    def __init__(
        self,
        files: Sequence[Path],
        column: str,
        labels: IntArray,
        starts: IntArray,
        rows: IntArray | None = None,
        images: Any = None,
    ) -> None:
        self.labels = labels
        self._files = files
        self._column = column
        self._starts = starts
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
        content = self._content(i)
        return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)

    def digest(self, i: int, *, content: bool = True) -> bytes:
        held = self._content(i)
        if isinstance(held, Path):
            held = held.read_bytes() if content else str(held.stat().st_size).encode()
        return head_digest(len(held), held)

    def stretches(self) -> Iterator[IntArray]:
        """Cut at the borders of files and of their row groups, which are read as a whole."""
        borders = []
        for file, start in zip(self._files, self._starts, strict=False):
            metadata = _opened(file).metadata
            groups = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            borders.append(start + np.cumsum(groups, dtype=np.int64))
        cuts = np.searchsorted(self._rows, np.concatenate(borders))
        every = np.arange(len(self), dtype=np.int64)
        yield from (stretch for stretch in np.split(every, cuts) if len(stretch))

    def select(self, rows: IntArray) -> Table:
        labels = self.labels[rows]
        rows = self._rows[rows]
        data: list[Any] = []
        paths: list[Any] = []
        for file, start, stop in zip(self._files, self._starts, self._starts[1:], strict=False):
            wanted = rows[(rows >= start) & (rows < stop)] - start
            for chunk in _take(file, self._column, wanted):
                halves = _halves(file, chunk)
                data += halves[0].chunks
                paths += halves[1].chunks
        images = (pa.chunked_array(data, pa.large_binary()), pa.chunked_array(paths, pa.string()))
        images = tuple(_in_one(column) for column in images)
        return _ParquetTable(self._files, self._column, labels, self._starts, rows, images)


def _take(file: Path, column: str, rows: IntArray) -> list[Any]:
    """Read ``rows`` (ascending) of a column, one row group in memory at a time."""
    parquet = _opened(file)
    taken = []
    start = 0
    for group in range(parquet.num_row_groups):
        stop = start + parquet.metadata.row_group(group).num_rows
        inside = rows[(rows >= start) & (rows < stop)] - start
        if len(inside):
            with _readable(file):
                taken.append(parquet.read_row_group(group, columns=[column]).column(0).take(inside))
        start = stop
    return taken


def _halves(file: Path, column: Any) -> tuple[Any, Any]:
    """Make bytes and path of an image column: a struct of both, plain bytes, or plain paths."""
    kind = column.type
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name for i in range(kind.num_fields)}
        table = pa.Table.from_batches(
            [pa.RecordBatch.from_struct_array(chunk) for chunk in column.chunks]
        )
        nothing = pa.nulls(len(column))
        data = table["bytes"] if "bytes" in fields else pa.chunked_array([nothing])
        path = table["path"] if "path" in fields else pa.chunked_array([nothing])
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        data, path = column, pa.chunked_array([pa.nulls(len(column))])
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        data, path = pa.chunked_array([pa.nulls(len(column))]), column
    else:
        raise UserError(
            f"{file}: the image column holds {kind}. "
            "Store encoded images, as bytes or {bytes, path}."
        )
    return data.cast(pa.large_binary()), path.cast(pa.string())


def _in_one(column: Any) -> Any:
    """Join a column's chunks, so that a row is found at once."""
    joined = column.combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) and joined.num_chunks else joined
