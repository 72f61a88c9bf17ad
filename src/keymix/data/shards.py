# SPDX-License-Identifier: Apache-2.0
"""Shards of encoded images, read in order while training: which image is served when, and by whom.

A reader is a data worker of a rank. The shards of an epoch, in an order of their own, are one long
row; each reader gets an equal stretch of it. It reads a few shards side by side and shuffles what
it read by the buffer. So a position in an epoch is computed, not stored: a reader starts anywhere.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor

from keymix.data.decode import Encoded
from keymix.data.sample import Row
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

INDEX = "index.json"
"""The file next to shards that says what is in them."""
SIDE_BY_SIDE = 8
"""Shards that a reader has open at once."""
BUFFER = 1024
"""Encoded images of a reader that are shuffled with each other."""
TROUBLE = (
    *(OSError, ValueError, RuntimeError, LookupError, EOFError, TypeError),
    *(tarfile.TarError, pa.ArrowException, *HfHubHTTPError.__bases__),
)
"""What file systems, the Hub and readers of shards raise."""
EXTRA = "`pip install 'keymix[stream]'`"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What is known of a shard without reading it."""

    file: str  # or its address
    images: int
    sha256: str  # of its images and labels


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """What `INDEX` says of the shards next to it."""

    layout: str  # parquet or webdataset
    source: str  # the spec of the data that they were made of
    classes: tuple[str, ...]
    image: str  # name of the images' column, or ending of their files
    label: str
    splits: Mapping[str, tuple[Shard, ...]]
    in_chans: int = 3
    image_size: tuple[int, int] | None = None
    of_class: tuple[int, ...] = ()  # training images of each class; empty where nobody counted
    format: int = 1


def hugging_face() -> Any:
    """Import ``datasets``, which takes seconds, or say that it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"stream: shards are read by the package datasets: {EXTRA}.") from error
    return datasets


@dataclass(frozen=True, eq=False, repr=False)
class Shards(Sequence[Row]):
    """The images of some shards, by position; `served` reads them in an order.

    A row by itself is read through its shard up to there: for a few images, not for an epoch.
    """

    of: ShardIndex
    shards: Sequence[Shard]
    starts: IntArray = field(init=False)  # first position of each shard, and the number of all

    def __post_init__(self) -> None:
        counts = np.array([0, *(each.images for each in self.shards)], dtype=np.int64)
        object.__setattr__(self, "starts", np.cumsum(counts))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, i: Any) -> Any:
        i = range(len(self))[i]
        return Row(id=self.name(i), image=partial(self._decoded, i), target=partial(self._class, i))

    @property
    def digest(self) -> str:
        """Hash of what is in them."""
        known = "".join(f"{each.images} {each.sha256}\n" for each in self.shards)
        return hashlib.sha256(known.encode()).hexdigest()

    def name(self, i: int) -> str:
        """Say where an image is."""
        shard = self._shard(i)
        return f"{self.shards[shard].file} row {i - int(self.starts[shard])}"

    def few(self, number: int) -> IntArray:
        """Choose about a number of positions, the first ones of up to eight shards; or all."""
        if len(self) <= number:
            return np.arange(len(self))
        chosen = np.unique(np.linspace(0, len(self.shards) - 1, SIDE_BY_SIDE).astype(int))
        each = -(-number // len(chosen))
        return np.concatenate(
            [self.starts[k] + np.arange(min(each, self.shards[k].images)) for k in chosen]
        )

    def fetch(self, positions: IntArray) -> dict[int, Row]:
        """Read the images at ascending positions; neighbours are read in one go."""
        return dict(self._fetched(positions, {}))

    def served(
        self, first: int, size: int, *, skip: int, seed: int, epoch: int | None
    ) -> Iterator[tuple[int, Row]]:
        """Read a reader's stretch of an epoch in its order, without the ones to ``skip``."""
        rows: dict[int, tuple[int, Iterator[tuple[bytes, int]]]] = {}
        for block in self.blocks(first, size, seed=seed, epoch=epoch):
            if skip < len(block):
                found: dict[int, Row] = {}  # before the next ones are read
                found |= self._fetched(np.unique(block), rows)
                yield from ((i, found[i]) for i in block[skip:].tolist())
            skip = max(0, skip - len(block))

    def blocks(self, first: int, size: int, *, seed: int, epoch: int | None) -> Iterator[IntArray]:
        """List the positions of a reader's stretch of an epoch in its order, a buffer at a time.

        The stretch are ``size`` images from the ``first`` on, of the shards in the epoch's order,
        which starts again after its end. Without an epoch nothing is shuffled.
        """
        pieces = [*self._pieces(first, size, seed=seed, epoch=epoch)]
        for begin in range(0, len(pieces), SIDE_BY_SIDE):
            group = pieces[begin : begin + SIDE_BY_SIDE]
            of = np.concatenate([np.arange(start, start + count) for start, count in group])
            if epoch is not None:  # images of all shards in turn, so that they end together
                turns = [(np.arange(count) + 0.5) / count for _, count in group]
                of = of[np.argsort(np.concatenate(turns), kind="stable")]
            for at in range(0, len(of), BUFFER):
                block = of[at : at + BUFFER]
                if epoch is not None:
                    block = block[np.argsort(hash64(seed, epoch, Stream.ORDER, block))]
                yield block

    def _pieces(
        self, first: int, size: int, *, seed: int, epoch: int | None
    ) -> Iterator[tuple[int, int]]:
        """Cut a stretch where a shard ends: first position and number of images of each piece."""
        order = np.arange(len(self.shards), dtype=np.int64)
        if epoch is not None:
            order = np.argsort(hash64(seed, epoch, Stream.SHARDS, order), kind="stable")
        ends = np.cumsum(np.diff(self.starts)[order])
        while size > 0:
            first %= len(self)
            place = int(np.searchsorted(ends, first, side="right"))
            count = min(size, int(ends[place]) - first)
            yield int(self.starts[order[place] + 1]) - (int(ends[place]) - first), count
            first, size = first + count, size - count

    def _fetched(
        self, positions: IntArray, rows: dict[int, tuple[int, Iterator[tuple[bytes, int]]]]
    ) -> Iterator[tuple[int, Row]]:
        """Read ascending positions; ``rows`` has the row that each open shard is at, and the rest.

        Shards without any of the positions are closed.
        """
        shards = self._shard(positions)
        for shard in rows.keys() - set(shards.tolist()):
            del rows[shard]
        for i, shard in zip(positions.tolist(), shards.tolist(), strict=True):
            row = i - int(self.starts[shard])
            at, rest = rows.get(shard, (-1, iter(())))
            if at != row:
                rest = self._read(shard, row)
            data, label = next(rest)
            if row + 1 == self.shards[shard].images:
                next(rest, None)  # ends it: a reader that is cut short collects all garbage
            image = Encoded(data, self.name(i), remedy="Write its shard again.")
            yield i, Row(id=image.name, image=image, target=label)
            rows[shard] = row + 1, rest

    def _read(self, shard: int, first: int) -> Iterator[tuple[bytes, int]]:
        """Read encoded images and class numbers of a shard from a row on, as many as it says."""
        of, row = self.shards[shard], first
        try:
            rows = self._set.shard(len(self.shards), shard).skip(first)
            for found in rows.iter(batch_size=1):  # a plain loop would leave rows to other workers
                (label,), (image,) = found[self.of.label], found[self.of.image]
                if not isinstance(label, int) or not 0 <= label < len(self.of.classes):
                    why = f"the label of row {row} is {label!r}, none of its classes"
                    raise UserError(f"shard {of.file}: {why}. Write the shard again.")
                yield image["bytes"], label
                row += 1
        except UserError:
            raise
        except TROUBLE as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise _lost(of, f"cannot be read ({type(error).__name__}: {why})") from error
        if row < of.images:
            raise _lost(of, f"ends after {row} of {of.images} images")

    @cached_property
    def _set(self) -> Any:
        """The shards as Hugging Face streams them; images stay encoded."""
        datasets = hugging_face()
        datasets.disable_progress_bars()
        layout, image, label = self.of.layout, self.of.image, self.of.label
        kinds = {image: datasets.Image(decode=False), label: datasets.Value("int64")}
        if layout == "webdataset":
            kinds |= dict.fromkeys(("__key__", "__url__"), datasets.Value("string"))
        return datasets.load_dataset(
            layout,
            data_files={"train": [each.file for each in self.shards]},
            split="train",
            streaming=True,
            features=datasets.Features(kinds),
            **({"columns": [image, label]} if layout == "parquet" else {}),
        )

    def _shard(self, positions: Any) -> Any:
        """Find the shard of a position or of each."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def _one(self, i: int) -> Row:
        return self.fetch(np.array([i]))[i]

    def _decoded(self, i: int) -> Tensor:
        return self._one(i).image()

    def _class(self, i: int) -> int:
        return int(self._one(i).target)


def _lost(shard: Shard, why: str) -> UserError:
    return UserError(
        f"shard {shard.file} {why}. Restore it, then run the same command again: a run resumes "
        "from its last checkpoint."
    )


def shares(count: int, batch_size: int, readers: int) -> list[int]:
    """Count the images of each of a rank's readers, which make its batches in turn."""
    full, rest = divmod(count, batch_size)
    of = [batch_size * len(range(reader, full, readers)) for reader in range(readers)]
    of[full % readers] += rest
    return of
