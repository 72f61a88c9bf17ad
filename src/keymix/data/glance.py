# SPDX-License-Identifier: Apache-2.0
"""The cheap part of `keymix.data.check`, of data that is loaded: seconds, whatever its size.

It finds what falsifies a comparison without a sign of it: copies in several splits or with several
labels, cases in several splits, missing rows of masks, frames of sequences, uneven classes. What
there was no time for is named.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from keymix.data import contents
from keymix.data.dataset import ImageData, Split
from keymix.data.decode import DAMAGE
from keymix.data.files import threads
from keymix.data.findings import Report
from keymix.data.sequences import sequences_of
from keymix.data.survey import HASH, Survey

SECONDS = 10.0
"""Time for images that are read one by one; of those in memory all are looked at."""
_CHUNK = 64  # images between two looks at the clock
_THREADS = 4
_FIRST = 0.8  # share of the time for a first look; the rest is for the copies that it finds


def glance(
    data: ImageData, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> Report:
    """Look for what would falsify a comparison on data, for some seconds.

    Copies are found by the pixels that a model sees. JPEG files that are read one by one are
    decoded smaller first, and whole where two are equal so.

    Returns the findings. Facts are ``looked_at`` (images, and of how many), ``not_looked_at``
    (sentences) and, where there are any, ``sequences``.
    """
    report = Report(spec=data.spec)
    start = clock()

    def late(share: float = 1.0) -> bool:
        return clock() - start > share * seconds

    missed = []
    targets, items = data.train.targets, data.kind.nouns
    grouped = data.facts.grouped is not False
    if targets.groups is None or not grouped:
        tables = {split.name: split.table for split in data.splits}
        try:
            found = sequences_of(tables, late=late)
            contents.add_sequences(report, found, targets.kind)
        except TimeoutError:
            missed.append(f"whether {items} are frames of sequences")
    looks = _looks(data, (lambda share: False) if data.train.inputs.quick else late)
    images = _images(data, looks)
    contents.add_copies(report, images)
    contents.add_cases(report, images, grouped=grouped)
    contents.findings_of(targets).glance(report, images, data)
    seen = sum(int(look.tried.sum()) for look in looks.values())
    every = sum(map(len, data.splits))
    if seen < every:
        missed.append(f"copies among {every - seen:,} of {every:,} {items}")
    report.facts["looked_at"] = {"images": seen, "of": every}
    report.facts["not_looked_at"] = missed
    return report


class _Look:
    """What was seen of a split: hashes of inputs and targets; sizes are 0 if not decoded."""

    def __init__(self, count: int) -> None:
        self.hashes = np.zeros(count, dtype=f"V{HASH}")
        self.targets = np.zeros(count, dtype=f"V{HASH}")
        self.sizes = np.zeros((count, 2), dtype=np.int64)
        self.blank = np.zeros(count, dtype=np.bool_)
        self.tried = np.zeros(count, dtype=np.bool_)


def _looks(data: ImageData, late: Callable[[float], bool]) -> dict[str, _Look]:
    """Hash images in an order that is always the same until it is late."""
    looks = {split.name: _Look(len(split)) for split in data.splits}
    splits = {split.name: split for split in data.splits}

    def see(place: tuple[str, int], whole: bool = False) -> None:
        name, i = place
        look = looks[name]
        look.tried[i] = not late(1.0 if whole else _FIRST)
        look.sizes[i] = 0
        if look.tried[i]:
            with suppress(*DAMAGE):  # a broken image is no copy, and training names it
                _see(splits[name], i, look, whole=whole)

    with threads(_THREADS) as pool:
        for chunk in _chunks(data):
            for _ in pool.imap(see, chunk):
                pass
            if late(_FIRST):
                break
        for _ in pool.imap(partial(see, whole=True), _alike(data, looks)):
            pass
    return looks


def _alike(data: ImageData, looks: dict[str, _Look]) -> list[tuple[str, int]]:
    """List the images that were decoded smaller and equal another one so."""
    if not data.train.inputs.drafted:
        return []
    places = [
        (name, int(i)) for name, look in looks.items() for i in np.flatnonzero(look.sizes[:, 0])
    ]
    hashes = [looks[name].hashes[i].tobytes() for name, i in places]
    often = Counter(hashes)
    return [place for place, one in zip(places, hashes, strict=True) if often[one] > 1]


def _chunks(data: ImageData) -> Iterator[list[tuple[str, int]]]:
    """Go through images to learn from and images to measure on by turns, so that copies meet."""
    random = np.random.default_rng(0)
    others = [(split.name, i) for split in data.splits[1:] for i in range(len(split))]
    learned = [("train", i) for i in random.permutation(len(data.train)).tolist()]
    measured = [others[k] for k in random.permutation(len(others)).tolist()]
    half = _CHUNK // 2
    for at in range(0, max(len(learned), len(measured)), half):
        yield learned[at : at + half] + measured[at : at + half]


def _see(split: Split, i: int, look: _Look, *, whole: bool = False) -> None:
    content, look.blank[i] = split.inputs.content(i, whole=whole)
    look.hashes[i] = _hash(content)
    look.targets[i] = _hash(split.targets.content(i))
    look.sizes[i] = split.image_size[::-1]


def _hash(content: bytes) -> np.void:
    return np.void(hashlib.blake2b(content, digest_size=HASH).digest())


def _images(data: ImageData, looks: dict[str, _Look]) -> contents.Images:
    surveys = {
        name: Survey(
            look.hashes,
            look.sizes,
            np.zeros(len(look.sizes), dtype=np.int64),
            {},
            targets=look.targets,
            blank=look.blank,
        )
        for name, look in looks.items()
    }
    return contents.Images(
        data.classes,
        {split.name: split.table for split in data.splits},
        surveys,
        {name: np.full(len(look.sizes), name) for name, look in looks.items()},
        data.kind,
    )
