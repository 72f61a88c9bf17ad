# SPDX-License-Identifier: Apache-2.0
"""Parquet files in Hugging Face's image layout: ``image`` = {bytes, path}, ``label``.

Labels are read at once, images only for the rows that a split keeps; their encoded bytes are kept
in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from keymix.data.decode import open_image
from keymix.data.files import existing_path, regular
from keymix.data.sources.base import Faults, Source, Table, head_digest, some
from keymix.data.specs import DataSpec
from keymix.data.streams import IntArray
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="parquet",
        argument="PATH",
        summary="Hugging Face image layout: a parquet file, or a folder of train-*.parquet, "
        "test-*.parquet, validation-*.parquet",
        settings=("cell_mib",),
        on_disk=True,
    ),
)

CELL_MIB = 64
"""MiB that an image of a parquet file may take where nobody says more: 5,700 x 5,700 pixels of 16
bits, not compressed."""
_BATCH = 256 << 20  # bytes that a batch may unpack to
_JOINED = 64 << 20  # bytes of small batches that are worked on as one
_ROWS = 1 << 14  # rows of a batch, at most
_LONGEST = 1000  # characters of a class's name
_SPLIT_FILE = re.compile(r"(train|test|validation|valid|val)(?:[-_.].*)?\.parquet")


def open_source(argument: str, faults: Faults, *, cell_mib: int = CELL_MIB) -> Source:
    """Open a parquet file, or a folder of parquet files named by split."""
    files, notes = _files(existing_path("parquet", argument))
    return open_files(files, notes, f"parquet:{argument}", faults, cell_mib=cell_mib)


def open_files(
    files: Mapping[str, list[Path]],
    notes: list[str],
    spec: str,
    faults: Faults,
    *,
    cell_mib: int = CELL_MIB,
) -> Source:
    """Open parquet files that were sorted by split."""
    columns = find_columns(files["train"][0])
    raw = {split: _Labels.read(paths, columns, faults) for split, paths in files.items()}
    if "test" in raw and raw["test"].hidden():
        del raw["test"]
        notes = [*notes, "the test split's labels are hidden (all -1), so it is not used"]
    if not raw["train"].files:
        raise UserError(f"data {spec}: none of its training files can be read.")
    if not raw["train"].values:
        raise UserError(f"data {spec} has no rows in {files['train'][0]}.")
    if raw["train"].hidden():
        raise UserError(
            f"data {spec}: no row of train has a label: all are missing or -1 in column "
            f"{columns.label!r}. Write the classes there."
        )
    classes, number = _classes(raw["train"], columns, faults)
    tables = {
        split: _ParquetTable(labels.files, columns.image, number(labels), labels.starts, cell_mib)
        for split, labels in raw.items()
        if labels.values
    }
    absent = np.setdiff1d(np.arange(len(classes)), tables["train"].labels)
    if len(classes) - len(absent) < 2:
        faults.report(
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
            f"data parquet:{path}: no train-*.parquet next to {some([f.name for f in found])}. "
            "Rename the training files, or give one file."
        )
    raise UserError(f"data parquet:{path}: no *.parquet files there, nor in its folder data.")


@dataclass(frozen=True)
class _Labels:
    """The label column of a split's files as it stands there, and where each file starts."""

    files: list[Path]
    values: list[Any]
    starts: IntArray

    @staticmethod
    def read(files: list[Path], columns: Columns, faults: Faults) -> _Labels:
        values: list[Any] = []
        starts, good = [0], []
        for file in files:
            try:
                values += _label_column(file, columns)
            except UserError as error:
                faults.report("unreadable file", file, str(error))
                continue
            good.append(file)
            starts.append(len(values))
        return _Labels(good, values, np.asarray(starts, dtype=np.int64))

    def where(self, row: int) -> str:
        return _where(self.files, self.starts, row)

    def hidden(self) -> bool:
        return bool(self.values) and all(v is None or v == -1 for v in self.values)


def _label_column(file: Path, columns: Columns) -> list[Any]:
    parquet = opened(file)
    for name in (columns.image, columns.label):
        if name not in parquet.schema_arrow.names:
            raise UserError(f"{file} has no column {name!r}, which other files have.")
    check_labels(file, parquet.schema_arrow, columns.label)
    values: list[Any] = []
    own: dict[Any, Any] = {}  # equal text is kept once
    for group in range(parquet.num_row_groups):
        for batch in batches(parquet, file, group, columns.label):
            for value in batch.to_pylist():
                if isinstance(value, str) and len(value) > _LONGEST:
                    raise UserError(
                        f"{file} row {len(values)}: {columns.label!r} has {len(value):,} "
                        f"characters; the name of a class has {_LONGEST:,} at most. Shorten it."
                    )
                values.append(own.setdefault(value, value))
    return values


def _where(files: Sequence[Path], starts: IntArray, row: int) -> str:
    file = int(np.searchsorted(starts, row, side="right")) - 1
    return f"{files[file]} row {row - int(starts[file])}"


def _classes(
    train: _Labels, columns: Columns, faults: Faults
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


def _bad_label(labels: _Labels, columns: Columns, row: int, faults: Faults) -> None:
    value, where = labels.values[row], labels.where(row)
    why = "missing" if value is None else f"{value!r}, which is no class of the training data"
    faults.report(
        "bad label", where, f"{where}: {columns.label!r} is {why}. Correct or remove the row."
    )


class _ParquetTable(Table):
    """Rows of a split's files. Images are there only in what `select` and `parts` give."""

    def __init__(
        self,
        files: Sequence[Path],
        column: str,
        labels: IntArray,
        starts: IntArray,
        mib: int,
        *,
        rows: IntArray | None = None,
        images: Sequence[Cells] = (),
    ) -> None:
        self.labels = labels
        self._files = files
        self._column = column
        self._starts = starts
        self._rows = np.arange(len(labels), dtype=np.int64) if rows is None else rows
        self._mib = mib
        self._images: tuple[Any, Any] | None = None
        self._large: dict[int, str] = {}
        if images:
            first = 0
            for some in images:
                self._large |= {first + i: why for i, why in some.large.items()}
                first += len(some)
            self._images = (
                in_one([some.data for some in images], pa.large_binary()),
                in_one([some.paths for some in images], pa.string()),
            )

    def name(self, i: int) -> str:
        return _where(self._files, self._starts, int(self._rows[i]))

    def _content(self, i: int) -> bytes | Path:
        if self._images is None:
            raise RuntimeError("images are read by select(); call it first")
        if i in self._large:
            raise ValueError(self._large[i])
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
        """Read the row groups one after the other, large ones in several tables."""
        for rows, read in self._read():
            yield rows, read if isinstance(read, UserError) else self._of(rows, [read])

    def select(self, rows: IntArray) -> Table:
        wanted = self._of(rows, [])
        read = []
        for at, found in wanted._read():
            if isinstance(found, UserError):
                raise found
            read.append((at, found))
        return self._of(rows, [found for _, found in read])

    def _of(self, rows: IntArray, images: Sequence[Cells]) -> _ParquetTable:
        """Make the table of some rows, with their images if they are read."""
        return _ParquetTable(
            self._files,
            self._column,
            self.labels[rows],
            self._starts,
            self._mib,
            rows=self._rows[rows],
            images=images,
        )

    def _read(self) -> Iterator[tuple[IntArray, Cells | UserError]]:
        """Read the images, a batch in memory at a time; what cannot be read gives its error."""
        for file, start, stop in zip(self._files, self._starts, self._starts[1:], strict=False):
            at, end = np.searchsorted(self._rows, [start, stop]).tolist()
            try:
                parquet = opened(file)
            except UserError as error:
                yield np.arange(at, end, dtype=np.int64), error
                continue
            for group, (first, last) in enumerate(borders(parquet)):
                at, end = np.searchsorted(self._rows, [start + first, start + last]).tolist()
                wanted = self._rows[at:end] - (start + first)
                if not len(wanted):
                    continue
                try:
                    for some in cells(parquet, file, group, self._column, wanted, self._mib):
                        yield np.arange(at, at + len(some), dtype=np.int64), some
                        at += len(some)
                except UserError as error:
                    yield np.arange(at, end, dtype=np.int64), error


_IMAGE_NAMES = ("image", "img", "images", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
_SHOWN = 60  # characters of a type


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns."""

    image: str
    label: str
    # of the classes, by their numbers; None where the file does not say
    names: tuple[str, ...] | None


def find_columns(file: Path) -> Columns:
    """Find the image and the label column of a file from its schema."""
    schema = opened(file).schema_arrow
    features: dict[str, Any] = {}
    try:
        info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = {**info.get("info", {}).get("features", {})}
    except (ValueError, AttributeError, TypeError, RecursionError):  # another writer's metadata
        pass  # go by the names

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
    check_labels(file, schema, label)
    names = features.get(label, {}).get("names") if isinstance(features.get(label), dict) else None
    return Columns(image, label, tuple(map(str, names)) if names and type(names) is list else None)


def check_labels(file: Path, schema: Any, column: str) -> None:
    """Refuse labels of a type that names no class."""
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    fits = (
        pa.types.is_integer,
        pa.types.is_boolean,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_null,  # a column of nothing is reported by its rows
    )
    if not any(fit(value) for fit in fits):
        raise UserError(
            f"{file}: the labels in column {column!r} are {str(kind)[:_SHOWN]}; a class is a whole "
            "number or text. Write them so."
        )


def _is_image_struct(kind: Any) -> bool:
    """Return whether a column has the layout of Hugging Face's images, {bytes, path}."""
    if not pa.types.is_struct(kind):
        return False
    return {"bytes", "path"} <= {kind.field(i).name for i in range(kind.num_fields)}


def _pick(typed: list[str], present: Sequence[str], usual: Sequence[str]) -> str | None:
    """Choose a column: the usual name among those of the right type, else the first of the type."""
    for columns in (typed, list(present)):
        for name in usual:
            if name in columns:
                return name
    return typed[0] if typed else None


@dataclass(frozen=True, eq=False)
class Cells:
    """Images of some rows of a file."""

    data: Any  # encoded images, null where a row has none or too large a one
    paths: Any  # their files, null where a row names none
    large: dict[int, str]  # why an image is too large, by position

    def __len__(self) -> int:
        return len(self.data)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = text.splitlines()[0]
        raise UserError(f"{file} is not a readable parquet file: {reason}") from error


def opened(file: Path) -> Any:
    """Open a parquet file."""
    with readable(file):
        parquet = pq.ParquetFile(regular(file))
        size = file.stat().st_size
    if parquet.metadata.num_rows > size:
        raise UserError(
            f"{file} is not a readable parquet file: it claims {parquet.metadata.num_rows:,} rows "
            f"in {size:,} bytes"
        )
    return parquet


def borders(parquet: Any) -> list[tuple[int, int]]:
    """List first row and end of each row group."""
    counts = [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return list(zip([0, *ends], ends, strict=False))


def batches(parquet: Any, file: Path, group: int, column: str) -> Iterator[Any]:
    """Read a column of a row group, at a time no more rows than memory can take."""
    rows = min(_rows_at_once(chunk) for chunk in _chunks(parquet, group, column))
    with readable(file):
        waiting: list[Any] = []
        size = 0
        for batch in parquet.iter_batches(batch_size=rows, row_groups=[group], columns=[column]):
            waiting.append(batch.column(0))
            size += batch.nbytes
            if size >= _JOINED:
                yield pa.concat_arrays(waiting) if len(waiting) > 1 else waiting[0]
                waiting, size = [], 0
        if waiting:
            yield pa.concat_arrays(waiting)


def cells(
    parquet: Any, file: Path, group: int, column: str, wanted: IntArray, mib: int
) -> Iterator[Cells]:
    """Read images of a row group."""
    most = mib << 20
    chunks = _chunks(parquet, group, column)
    count = parquet.metadata.row_group(group).num_rows
    mean = max(chunk.total_uncompressed_size for chunk in chunks) // max(1, count)
    if mean > most:  # so is one at least: nothing needs to be unpacked to know
        why = f"images of its row group take {mean:,} bytes on average, {_more_than(mib)}"
        nothing = pa.nulls(len(wanted))
        yield Cells(
            nothing.cast(pa.large_binary()),
            nothing.cast(pa.string()),
            dict.fromkeys(range(len(wanted)), why),
        )
        return
    start = 0
    for batch in batches(parquet, file, group, column):
        first, end = np.searchsorted(wanted, [start, start + len(batch)])
        if end > first:
            with readable(file):
                some = batch
                if end - first < len(batch):
                    some = batch.take(pa.array(wanted[first:end] - start))
                yield _bounded(*_halves(file, some), mib)
        start += len(batch)
        if start > wanted[-1]:
            return


def in_one(parts: list[Any], kind: Any) -> Any:
    """Join arrays, so that a row is found at once."""
    joined = pa.chunked_array(parts, kind).combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) and joined.num_chunks else joined


def _chunks(parquet: Any, group: int, column: str) -> list[Any]:
    """List what the file says of a column, or of the parts of a nested one."""
    metadata = parquet.metadata.row_group(group)
    every = [metadata.column(i) for i in range(metadata.num_columns)]
    inside = column + "."
    return [chunk for chunk in every if f"{chunk.path_in_schema}.".startswith(inside)]


def _rows_at_once(chunk: Any) -> int:
    """Say how many rows of a column can be unpacked together.

    A cell is no larger than all that is stored. Without a dictionary, neither are all cells.
    """
    size = max(1, int(chunk.total_uncompressed_size))
    if chunk.physical_type not in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
        return _ROWS
    if not chunk.has_dictionary_page and size <= _BATCH:
        return _ROWS
    return max(1, min(_ROWS, _BATCH // size))


def _bounded(data: Any, paths: Any, mib: int) -> Cells:
    """Drop the images that are too large."""
    sizes = pc.fill_null(pc.binary_length(data), 0).to_numpy(zero_copy_only=False)
    over = np.flatnonzero(sizes > mib << 20)
    large = {int(i): f"takes {int(sizes[i]):,} bytes, {_more_than(mib)}" for i in over}
    if large:
        data = data.take(pa.array(np.arange(len(data)), mask=sizes > mib << 20))
    return Cells(data, paths, large)


def _more_than(mib: int) -> str:
    return f"more than the {mib} MiB that data.cell_mib allows"


def _halves(file: Path, column: Any) -> tuple[Any, Any]:
    """Make bytes and path of an image column: a struct of both, plain bytes, or plain paths."""
    kind = column.type
    nothing = pa.nulls(len(column))
    data = path = nothing
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name for i in range(kind.num_fields)}
        batch = pa.RecordBatch.from_struct_array(column)
        data = batch["bytes"] if "bytes" in fields else nothing
        path = batch["path"] if "path" in fields else nothing
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        data = column
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        path = column
    else:
        raise UserError(
            f"{file}: the image column holds {kind}. "
            "Store encoded images, as bytes or {bytes, path}."
        )
    return data.cast(pa.large_binary()), path.cast(pa.string())
