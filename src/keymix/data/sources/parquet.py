# SPDX-License-Identifier: Apache-2.0
"""Parquet files in Hugging Face's image layout: ``image`` = {bytes, path}, ``label``.

Labels are read at once, images only for the rows that a split keeps; their encoded bytes are held
in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from keymix.data.decode import open_image
from keymix.data.regular import regular
from keymix.data.sources.base import Faults, Source, Table, head_digest, some
from keymix.data.sources.cells import CELL_MIB, Cells, batches, borders, cells, in_one, opened
from keymix.data.sources.columns import Columns, check_labels, find_columns
from keymix.data.specs import existing_path
from keymix.data.streams import IntArray
from keymix.errors import UserError

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
                faults.tell("unreadable file", file, str(error))
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
    faults.tell(
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
        held = self._content(i)
        if isinstance(held, Path):
            held = regular(held).read_bytes() if content else str(held.stat().st_size).encode()
        return head_digest(len(held), held)

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
