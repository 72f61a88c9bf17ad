# SPDX-License-Identifier: Apache-2.0
"""Shards, parquet or WebDataset, here or elsewhere, streamed through Hugging Face ``datasets``.

Their `keymix.data.shards.INDEX` says what is in them. Parquet files in Hugging Face's layout need
none: their footers say how many rows they have, and their schema names the classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from keymix.data.files import threads
from keymix.data.sample import Faults, Row, Source
from keymix.data.shards import INDEX, TROUBLE, Shard, ShardIndex, Shards, hugging_face
from keymix.data.sources.hf import Found, chosen, sorted_by_path
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
        split: Shards(index, [each for each in shards if each.images])
        for split, shards in index.splits.items()
    }
    if not len(of.get("train", ())):
        raise UserError(f"data stream:{argument}: no shard of train has an image. Add some.")
    if "test" not in of and "val" in of:
        of["test"] = of.pop("val")
        notes.append("test = the source's validation split")
    for split in [name for name in ("test", "val") if name not in of]:
        of["train"], of[split] = _held_out(of["train"], split, split_seed, argument)
        notes.append(f"{split} = {of[split].shards[0].file}, one of the shards of train")
    return Source(
        rows=[row for split in ("val", "test") for row in _rows(of[split], split)],
        stream=of["train"],
        classes=index.classes,
        in_chans=index.in_chans,
        image_size=index.image_size,
        notes=tuple(notes),
    )


def _rows(shards: Shards, split: str) -> Iterator[Row]:
    """Read all images of a split, encoded."""
    for _, row in shards.served(0, len(shards), skip=0, seed=0, epoch=None):
        yield replace(row, split=split)


def _held_out(train: Shards, split: str, seed: int, argument: str) -> tuple[Shards, Shards]:
    """Take a shard of train for a split that there is none of; test is always the same one."""
    if len(train.shards) < 2:
        raise UserError(
            f"data stream:{argument}: there is no split for {split}, and too few training shards "
            "to keep one for it. Write the shards by `keymix data shard`, which makes all splits."
        )
    keys = hash64(0 if split == "test" else seed, _HELD_OUT[split], np.arange(len(train.shards)))
    of = [*train.shards]
    held = of.pop(int(np.argmin(keys)))
    return Shards(train.of, of), Shards(train.of, [held])


def _opened(argument: str, spec: str) -> tuple[ShardIndex, list[str]]:
    """Read the index of shards, or make one of what parquet files say of themselves."""
    import fsspec

    hugging_face()
    place, config = str(Path(argument).expanduser()), ""
    if "://" in argument:
        place = argument.rstrip("/")
    elif not Path(place).exists():
        owner, name, config = (*argument.split("/", 2), "", "")[:3]
        if not owner or not name:
            raise UserError(f"data {spec}: there is no {argument!r}. Check the path.")
        place = f"hf://datasets/{owner}/{name}"
    with _reachable(spec):
        system, root = fsspec.core.url_to_fs(place)
        try:
            known = json.loads(system.cat_file(f"{root}/{INDEX}"))
        except FileNotFoundError:
            found = sorted_by_path(file.removeprefix(f"{root}/") for file in system.find(root))
            return _of_parquet(place, found and chosen(found, config, spec), spec), [place]
        index = from_json(ShardIndex, known, where=f"{place}/{INDEX}")
        splits = {
            name: tuple(replace(each, file=f"{place}/{each.file}") for each in shards)
            for name, shards in index.splits.items()
        }
        return replace(index, splits=splits), [f"shards of {index.source}"]


def _of_parquet(place: str, found: Sequence[Found], spec: str) -> ShardIndex:
    """Ask parquet files in Hugging Face's layout what they hold."""
    files: dict[str, list[str]] = {}
    for each in sorted(found):
        files.setdefault(each.split, []).append(f"{place}/{each.path}")
    if "train" not in files:
        raise UserError(
            f"data {spec}: there is no {INDEX} and no parquet file of train. Write shards by "
            "`keymix data shard`."
        )
    first = files["train"][0]
    columns = find_columns(_footer(first)[0], first)
    if not columns.classes:
        raise UserError(
            f"data {spec}: the schema of {first} does not name the classes of column "
            f"{columns.label!r}. Write shards by `keymix data shard parquet:PATH`."
        )
    splits = {}
    with threads(_FOOTERS) as pool:
        for split, of in files.items():
            known = zip(of, pool.map(_footer, of), strict=True)
            splits[split] = tuple(
                Shard(file=file, images=rows, sha256=digest) for file, (_, rows, digest) in known
            )
    return ShardIndex(
        layout="parquet",
        source=spec,
        classes=columns.classes,
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
    from aiohttp import ClientError  # comes with datasets

    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"data {spec}: {error}. Install what reads that address.") from error
    except (*TROUBLE, ClientError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"data {spec} cannot be read ({type(error).__name__}: {why}). Check the address and "
            "the network."
        ) from error
