# SPDX-License-Identifier: Apache-2.0
"""What a check sees of samples: of each its hash, its size, and what is wrong or odd about it."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    TRANSPARENT,
    convert,
    one_colour,
    orientation,
    reason,
    upright_size,
)
from keymix.data.files import ranges, threads
from keymix.data.kinds import CLASS, InputKind
from keymix.data.sources.base import Fault, Source, Table
from keymix.data.specs import Options, look_up
from keymix.data.streams import IntArray
from keymix.data.targets import Targets
from keymix.errors import UserError

HASH = 16  # bytes
SPLITS = ("train", "val", "test")
_CHUNK = 32  # samples per task
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(kw_only=True)
class Look:
    """What was seen of one sample."""

    hash: bytes = bytes(HASH)  # of the decoded input and its size; zero where it is broken
    size: tuple[int, int] = (0, 0)  # width and height, pixels
    brightest: int = 0  # largest 16-bit value; 0 of other images
    faults: Sequence[Fault] = ()
    # what is odd about a sample that can be used: a kind of `keymix.data.findings.KINDS` and words
    remarks: dict[str, str] = field(default_factory=dict)
    own: Any = None  # what more the findings of its target need


def hash_of(content: bytes, head: object = "") -> bytes:
    """Hash what makes inputs equal."""
    whole = hashlib.blake2b(str(head).encode(), digest_size=HASH)
    whole.update(content)
    return whole.digest()


class Samples:
    """All samples of a data set in one row, in the order of tables, and what was seen of each."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        targets: Sequence[Targets],
        origin: NDArray[np.str_],  # the source's own table of each sample
        split: NDArray[np.str_],
        *,
        classes: Sequence[str],
        kind: InputKind,
    ) -> None:
        self.tables, self.targets, self.origin, self.split = tables, targets, origin, split
        self.classes, self.kind, self.target = classes, kind, targets[0].kind
        self.strata = np.concatenate([each.strata for each in targets])
        self.groups = [name for each in targets for name in each.groups or ()]
        self.hashes = np.zeros(len(split), dtype=f"V{HASH}")
        self.sizes = np.zeros((len(split), 2), dtype=np.int64)  # width and height, pixels
        self.brightest = 0  # largest 16-bit value
        self.faults: dict[int, Sequence[Fault]] = {}
        self.remarks: dict[str, dict[int, str]] = {}  # by kind
        self.own: dict[int, Any] = {}
        self._starts = np.cumsum([0, *map(len, tables.values())]).tolist()

    def __len__(self) -> int:
        return len(self.split)

    def keep(self, k: int, look: Look) -> None:
        """Keep what was seen of sample ``k``."""
        self.hashes[k], self.sizes[k] = np.void(look.hash), look.size
        self.brightest = max(self.brightest, look.brightest)
        if look.faults:
            self.faults[k] = look.faults
        if look.own is not None:
            self.own[k] = look.own
        for kind, words in look.remarks.items():
            self.remarks.setdefault(kind, {})[k] = words

    @property
    def decoded(self) -> NDArray[np.bool_]:
        """Mark the samples that could be decoded."""
        marked: NDArray[np.bool_] = np.any(self.hashes.view(np.uint64).reshape(-1, 2), axis=1)
        return marked

    def place(self, k: int) -> tuple[int, int]:
        """Return the number of the table of sample ``k``, and its position there."""
        number = int(np.searchsorted(self._starts, k, side="right")) - 1
        return number, k - self._starts[number]

    def id(self, k: int) -> str:
        """Say where sample ``k`` comes from."""
        number, i = self.place(k)
        return [*self.tables.values()][number].name(i)

    def content(self, k: int) -> bytes | None:
        """Return bytes that identify the target of sample ``k``; None if it cannot be read."""
        number, i = self.place(k)
        try:
            return self.targets[number].content(i)
        except UserError:
            return None

    def item(self, k: int, reason: str = "") -> dict[str, str]:
        """Name sample ``k``, its split, and its class or case."""
        item = {"id": self.id(k), "split": str(self.split[k])}
        if self.classes and self.target is CLASS and self.strata[k] >= 0:
            item["class"] = self.classes[self.strata[k]]
        elif self.groups:
            item["case"] = self.groups[k]
        return {**item, "reason": reason} if reason else item

    def count(self, strata: IntArray, of: NDArray[np.str_]) -> dict[str, IntArray]:
        """Count numbers of classes in the splits (or origins) ``of`` each; below 0 is none."""
        counts = {
            name: np.bincount(strata[(of == name) & (strata >= 0)], minlength=len(self.classes))
            for name in SPLITS
            if (of == name).any()
        }
        return {name: number.astype(np.int64) for name, number in counts.items()}

    def look_at_all(
        self, source: Source, options: Options, progress: Callable[[int, int], None]
    ) -> None:
        """Look at every sample; one part of a table is in memory at a time."""
        look = look_up(source.looked)
        done = 0
        with warnings.catch_warnings(), threads(_THREADS) as pool:
            warnings.simplefilter("ignore")  # Pillow's, on odd files that it reads
            for start, table in zip(self._starts, self.tables.values(), strict=False):
                for stretch, part in table.parts():
                    first = start + int(stretch[0])
                    if isinstance(part, UserError):  # a file of many images
                        for k in range(first, first + len(stretch)):
                            fault = Fault("unreadable", str(part), self.id(k))
                            self.keep(k, Look(faults=[fault]))
                        done += len(stretch)
                        progress(done, len(self))
                        continue

                    def work(rows: range, part: Table = part, first: int = first) -> int:
                        looks = look(part, rows, source, options)
                        for i, seen in zip(rows, looks, strict=True):
                            self.keep(first + i, seen)
                        return len(rows)

                    for number in pool.imap(work, ranges(len(part), _CHUNK)):
                        done += number
                        progress(done, len(self))


def look_at_images(table: Table, rows: range, source: Source, options: Options) -> Iterator[Look]:
    """Decode some images of a table."""
    del options
    for i in rows:
        try:
            with table.open(i) as image:
                yield _look(image, source.in_chans)
        except DAMAGE as error:
            yield Look(faults=[Fault("unreadable", reason(error), table.name(i))])


def _look(image: Image.Image, in_chans: int) -> Look:
    mode, size = image.mode, upright_size(image)[::-1]
    deep = mode in SIXTEEN_BIT or any("16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    remarks = {
        # a camera's MPO holds previews next to the photo
        "animated": image.format != "MPO" and _yes(lambda: getattr(image, "is_animated", False)),
        "turned": orientation(image) != 1,
    }
    converted = {
        "16-bit": deep,
        "grey": mode in ("1", "L", "LA", *SIXTEEN_BIT),
        "CMYK": mode == "CMYK",
        "palette": mode in ("P", "PA"),
        "transparent": mode in TRANSPARENT or "transparency" in image.info,
    }
    brightest = int(np.asarray(image).max()) if mode in SIXTEEN_BIT else 0
    decoded = convert(image, in_chans)
    head = f"{decoded.mode} {decoded.size}"
    look = Look(hash=hash_of(decoded.tobytes(), head), size=size, brightest=brightest)
    look.remarks = {kind: "" for kind, there in remarks.items() if there}
    if any(converted.values()):
        look.remarks["converted"] = ", ".join(name for name, is_so in converted.items() if is_so)
    if one_colour(decoded):
        look.remarks["blank"] = ""
    return look


def _yes(question: Callable[[], bool]) -> bool:
    """Return no where the file is too damaged to say; decoding finds that out."""
    try:
        return question()
    except DAMAGE:
        return False
