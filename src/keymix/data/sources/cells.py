# SPDX-License-Identifier: Apache-2.0
"""Reads columns of parquet files in batches that fit in memory, whatever the files unpack to.

A column of a few kilobytes may unpack to gigabytes: by compression, and by a dictionary whose
entries many rows share. The sizes in a file's metadata bound both before anything is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from keymix.data.regular import regular
from keymix.data.streams import IntArray
from keymix.errors import UserError

CELL_MIB = 64
"""MiB that an image of a parquet file may take where nobody says more: 5,700 x 5,700 pixels of 16
bits, not compressed."""
_BATCH = 256 << 20  # bytes that a batch may unpack to
_GATHERED = 64 << 20  # bytes of small batches that are worked on as one
_ROWS = 1 << 14  # rows of a batch, at most


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
        told = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = told.splitlines()[0]
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
    """Read a column of a row group, so many rows at a time as cannot fill the memory."""
    rows = min(_rows_at_once(chunk) for chunk in _chunks(parquet, group, column))
    with readable(file):
        waiting: list[Any] = []
        size = 0
        for batch in parquet.iter_batches(batch_size=rows, row_groups=[group], columns=[column]):
            waiting.append(batch.column(0))
            size += batch.nbytes
            if size >= _GATHERED:
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
    told = parquet.metadata.row_group(group)
    every = [told.column(i) for i in range(told.num_columns)]
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
