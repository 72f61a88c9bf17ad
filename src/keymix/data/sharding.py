# SPDX-License-Identifier: Apache-2.0
"""Write a data set as shards: encoded images as they are, with their classes, split by split.

Training images are written in an order drawn once, so that each shard has images of all classes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from keymix.data.decode import Encoded, reading, to_image
from keymix.data.kinds import CLASS, IMAGE
from keymix.data.sample import Faults, Row, Source, refuse, select
from keymix.data.shards import INDEX, Shard, ShardIndex
from keymix.data.specs import Options, parse
from keymix.data.splits import Table, make_splits, sample
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError
from keymix.records import to_json

LAYOUTS = {"parquet": ".parquet", "webdataset": ".tar"}
SHARD_MB = 256
_GROUP = 64  # rows that are read at once
_SAMPLED = 200  # images whose length says how many make a shard
_Samples: TypeAlias = "Iterable[tuple[bytes, int]]"


def write_shards(
    spec: str,
    folder: Path,
    *,
    layout: str = "parquet",
    images: int | None = None,
    megabytes: float = SHARD_MB,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ShardIndex:
    """Write shards of a size, in images or about in megabytes, into a folder: all or nothing."""
    entry, argument = parse(spec)
    if entry.target_kind is not CLASS or entry.input_kind is not IMAGE:
        raise UserError(f"data {spec}: shards have images with a class each. Name such data.")
    options = Options()
    source = entry.open(argument, Faults(), options).by_position(spec)
    refuse(source.loose, "entries")
    table = Table.of(source.rows)
    parts, _ = make_splits(source, table, spec, options)
    index = {name: part.index for name, part in parts.items()}
    order = np.argsort(hash64(0, Stream.SHARDS, index["train"]), kind="stable")
    index["train"] = index["train"][order]
    spread = sample(len(order))
    few = select(source.rows, np.sort(index["train"])[spread[:: max(1, len(spread) // _SAMPLED)]])
    each = images or max(1, int(megabytes * 1e6 / np.mean([len(_content(row)) for row in few])))
    learned = table.strata[index["train"]]
    name = "png" if _content(few[0]).startswith(b"\x89PNG") else "jpg"
    made = ShardIndex(
        layout=layout,
        source=spec,
        classes=source.classes,
        in_chans=source.in_chans,
        image_size=source.image_size,
        image="image" if layout == "parquet" else name,
        label="label" if layout == "parquet" else "cls",
        splits={},
        of_class=tuple(np.bincount(learned, minlength=len(source.classes)).tolist()),
    )
    write = {"parquet": _parquet, "webdataset": _tar}[layout]
    folder.parent.mkdir(parents=True, exist_ok=True)
    done, total = 0, sum(map(len, index.values()))
    with tempfile.TemporaryDirectory(prefix=".keymix-shards-", dir=folder.parent) as place:
        new = Path(place) / "shards"
        new.mkdir()
        for split, chosen in index.items():
            shards: list[Shard] = []
            for start in range(0, len(chosen), each):
                some = chosen[start : start + each]
                file = f"{split}-{len(shards):05d}{LAYOUTS[layout]}"
                known = hashlib.sha256()
                write(new / file, _samples(source, some, known), made)
                shards.append(Shard(file=file, images=len(some), sha256=known.hexdigest()))
                done += len(some)
                progress(done, total)
            made = replace(made, splits={**made.splits, split: tuple(shards)})
        (new / INDEX).write_text(json.dumps(to_json(made), indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(Path(place) / "old")
        new.rename(folder)
    return made


def _samples(source: Source, chosen: IntArray, known: Any) -> Iterator[tuple[bytes, int]]:
    """Read images and class numbers in an order, and hash them."""
    rows = select(source.rows, np.sort(chosen))
    for place in np.argsort(np.argsort(chosen)).tolist():
        row = rows[place]
        content = _content(row)
        known.update(f"{row.target} {len(content)}\n".encode() + content)
        yield content, int(row.target)


def _content(row: Row) -> bytes:
    """Take an image as it is stored, after a look at its header; of one in memory make a PNG."""
    refuse(row.faults)
    with reading(row.id):
        if isinstance(row.image, Encoded):
            row.image.check(decode=False)
            return row.image.content()
        pixels = row.image()
        if pixels.dtype != torch.uint8:
            raise ValueError(f"{pixels.dtype} pixels, which no image file has; store files instead")
        made = io.BytesIO()
        to_image(pixels).save(made, "png")
        return made.getvalue()


def _parquet(file: Path, samples: _Samples, index: ShardIndex) -> None:
    """Write a shard in Hugging Face's image layout; encoded images are not compressed again."""
    kind = {"_type": "ClassLabel", "names": index.classes}
    info = {"info": {"features": {"image": {"_type": "Image"}, "label": kind}}}
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema(
        {"image": image, "label": pa.int64()}, metadata={"huggingface": json.dumps(info)}
    )
    with pq.ParquetWriter(file, schema, compression="none") as writer:
        rows: list[dict[str, Any]] = []
        for content, label in samples:
            rows.append({"image": {"bytes": content, "path": None}, "label": label})
            if len(rows) == _GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))


def _tar(file: Path, samples: _Samples, index: ShardIndex) -> None:
    """Write a shard of files ``NUMBER.jpg`` and ``NUMBER.cls``; all images have one ending."""
    with closing(tarfile.open(file, "w")) as archive:
        for number, (content, label) in enumerate(samples):
            for ending, data in ((index.image, content), (index.label, str(label).encode())):
                entry = tarfile.TarInfo(f"{number:09d}.{ending}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
