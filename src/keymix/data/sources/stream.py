# SPDX-License-Identifier: Apache-2.0
"""Shards, parquet or WebDataset, here or elsewhere, streamed through Hugging Face ``datasets``.

Their `keymix.data.shards.INDEX` says what is in them. Parquet files in Hugging Face's layout need
none: their footers say how many rows they have, and their schema names the classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from keymix.data.files import split_named, threads
from keymix.data.sample import Faults, Row, Source
from keymix.data.shards import INDEX, Shard, ShardIndex, Shards, hugging_face
from keymix.data.sources.parquet import find_columns
from keymix.data.specs import source
from keymix.data.streams import Stream, hash64
from keymix.errors import UserError
from keymix.records import from_json

_FOOTERS = 16  # read at once
_HELD_OUT = {"val": Stream.VALIDATION, "test": Stream.TEST}


@source(
    "stream",
    argument="PATH_OR_NAME",
    summary="parquet or WebDataset shards, read in order while training: a folder, a URL, or "
    "OWNER/NAME[/CONFIG] of the Hugging Face Hub",
)
def open_stream(
    argument: str,
    faults: Faults,
    *,
    split_seed: int = 0,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> Source:
    """Open shards; the images of validation and test are read at once, encoded, and kept."""
    for name, value in (("limit", limit), ("skip_corrupt", skip_corrupt)):
        if value:
            raise UserError(f"data.{name} = {value!r}: a stream is read whole. Leave it out.")
    index, notes = _opened(argument, f"stream:{argument}")
    of = {
        split: _shards(index, [each for each in shards if each.images])
        for split, shards in index.splits.items()
    }
    if not len(of.get("train", ())):
        raise UserError(f"data stream:{argument}: no shard of train has an image. Add some.")
    if "test" not in of and "val" in of:
        of["test"] = of.pop("val")
        notes.append("test = the source's validation split")
    for split in [name for name in ("test", "val") if name not in of]:
        of["train"], of[split] = _held_out(index, of["train"], split, split_seed, argument)
        notes.append(f"{split} = {of[split].shards[0].file}, one of the shards of train")
    return Source(
        rows=[row for split in ("val", "test") for row in _rows(of[split], split)],
        stream=of["train"],
        classes=index.classes,
        in_chans=index.in_chans,
        image_size=index.image_size,
        notes=tuple(notes),
    )


def _shards(index: ShardIndex, shards: Sequence[Shard]) -> Shards:
    return Shards(
        layout=index.layout,
        image=index.image,
        label=index.label,
        shards=shards,
        classes=len(index.classes),
    )


def _rows(shards: Shards, split: str) -> Iterator[Row]:
    """Read all images of a split, encoded."""
    for _, row in shards.served(0, len(shards), skip=0, seed=0, epoch=None):
        yield replace(row, split=split)


def _held_out(
    index: ShardIndex, train: Shards, split: str, seed: int, argument: str
) -> tuple[Shards, Shards]:
    """Take a shard of train for a split that there is none of; test is always the same one."""
    if len(train.shards) < 2:
        raise UserError(
            f"data stream:{argument}: there is no split for {split}, and too few training shards "
            "to keep one for it. Write the shards by `keymix data shard`, which makes all splits."
        )
    keys = hash64(0 if split == "test" else seed, _HELD_OUT[split], np.arange(len(train.shards)))
    of = [*train.shards]
    held = of.pop(int(np.argmin(keys)))
    return _shards(index, of), _shards(index, [held])


def _opened(argument: str, spec: str) -> tuple[ShardIndex, list[str]]:
    """Read the index of shards, or make one of what parquet files say of themselves."""
    path = Path(argument).expanduser()
    hugging_face()
    with _reachable(spec):
        if path.exists() or "://" in argument:
            place = argument.rstrip("/") if "://" in argument else str(path)
            known = _read(f"{place}/{INDEX}", spec)
            if known is not None:
                return known, [f"shards of {known.source}"]
            return _of_parquet(place, spec), []
        if argument.count("/") not in (1, 2):
            raise UserError(f"data {spec}: there is no {argument!r}. Check the path.")
        return _of_parquet(argument, spec), []


def _read(address: str, spec: str) -> ShardIndex | None:
    """Read an index, with the addresses of its shards; None where there is none."""
    import fsspec

    system, path = fsspec.core.url_to_fs(address)
    if not system.exists(path):
        return None
    found = from_json(ShardIndex, json.loads(system.cat_file(path)), where=address)
    place = address.removesuffix(INDEX)
    splits = {
        name: tuple(replace(each, file=place + each.file) for each in shards)
        for name, shards in found.splits.items()
    }
    return replace(found, splits=splits)


def _of_parquet(place: str, spec: str) -> ShardIndex:
    """Ask parquet files in Hugging Face's layout what they hold: a folder, a URL or a name."""
    datasets = hugging_face()
    name, config = place, None
    if not Path(place).exists() and "://" not in place:
        owner, name, *rest = place.split("/")
        name, config = f"{owner}/{name}", (*rest, None)[0]
    builder = datasets.load_dataset_builder(
        *(["parquet"] if "://" in place else [name, config]),
        **({"data_dir": place} if "://" in place else {}),
    )
    if builder.name != "parquet":
        raise UserError(
            f"data {spec}: {builder.name} files without {INDEX}, which says how many images they "
            "have and of which classes. Write them by `keymix data shard`."
        )
    files: Mapping[str, Sequence[str]] = {
        split_named(str(each)) or str(each): [*of] for each, of in builder.config.data_files.items()
    }
    first = next(iter(files.get("train", ())), None)
    if first is None:
        raise UserError(f"data {spec}: no files of train, only of {', '.join(files) or 'none'}.")
    columns = find_columns(_footer(first)[0], first)
    if not columns.classes:
        raise UserError(
            f"data {spec}: the schema of {first} does not name the classes of column "
            f"{columns.label!r}. Write shards by `keymix data shard parquet:PATH`."
        )
    with threads(_FOOTERS) as pool:
        splits = {
            split: tuple(
                Shard(file=file, images=rows, sha256=digest)
                for file, (_, rows, digest) in zip(of, pool.map(_footer, of), strict=True)
            )
            for split, of in files.items()
            if split in ("train", "val", "test")
        }
    return ShardIndex(
        layout="parquet",
        source=spec,
        classes=columns.classes,
        in_chans=3,
        image_size=None,
        image=columns.image,
        label=columns.label,
        splits=splits,
    )


def _footer(file: str) -> tuple[Any, int, str]:
    """Read a parquet file's schema, number of rows, and a hash of its name, length and footer."""
    import fsspec

    with fsspec.open(file, "rb") as stream:
        found = pq.ParquetFile(stream)
        rows, length = found.metadata.num_rows, stream.seek(0, 2)
        known = f"{Path(file).name} {length} {found.metadata.to_dict()}"
        return found.schema_arrow, rows, hashlib.sha256(known.encode()).hexdigest()


@contextmanager
def _reachable(spec: str) -> Iterator[None]:
    """Turn what file systems and the Hub raise into one line."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"data {spec}: {error}. Install what reads that address.") from error
    except Exception as error:  # each file system has errors of its own
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"data {spec} cannot be read ({type(error).__name__}: {why}). Check the address and "
            "the network."
        ) from error
