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
from keymix.data.decode import DAMAGE, convert
from keymix.data.events.serve import RecordedFrames
from keymix.data.findings import Report
from keymix.data.sequences import sequences_of
from keymix.data.streams import IntArray
from keymix.data.survey import HASH, Survey
from keymix.data.threads import threads

SECONDS = 10.0
"""Time for images that are read one by one; of those in memory all are looked at."""
_SIDE = 64  # pixels a side from which a JPEG file may be decoded smaller, which is quicker
_CHUNK = 64  # images between two looks at the clock
_THREADS = 4
_FIRST = 0.8  # share of the time for a first look; the rest is for the copies that it finds


def glance(
    data: ImageData, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> Report:
    """Look for what would falsify a comparison on data, for some seconds.

    Copies are found by the pixels that a model sees. JPEG files that are read one by one are
    decoded smaller first, and whole where two are equal so.

    Args:
        data: The data as it is trained on.
        seconds: Time for images that are read one by one.
        clock: Tells the time, seconds.

    Returns:
        The findings. Facts are ``looked_at`` (images, and of how many), ``not_looked_at``
        (sentences) and, where there are any, ``sequences``.
    """
    report = Report(spec=data.spec)
    start = clock()

    def late(share: float = 1.0) -> bool:
        return clock() - start > share * seconds

    missed = []
    if data.masks is None or not data.facts.grouped:
        tables = {split.name: split.table for split in data.splits}
        try:
            found = sequences_of(tables, late=late)
            contents.add_sequences(report, found, masks=data.masks is not None)
        except TimeoutError:
            missed.append("whether images are frames of sequences")
    whole = data.time_steps is not None or data.train.images is not None
    looks = _looks(data, (lambda share: False) if whole else late)
    if data.masks is None:
        _add_classes(report, data, looks)
    else:
        _add_masks(report, data, looks)
    seen = sum(int(look.tried.sum()) for look in looks.values())
    every = sum(map(len, data.splits))
    if seen < every:
        missed.append(f"copies among {every - seen:,} of {every:,} images")
    report.facts["looked_at"] = {"images": seen, "of": every}
    report.facts["not_looked_at"] = missed
    return report


class _Look:
    """What was seen of a split's images: hashes of pixels and masks; sizes are 0 if not decoded."""

    def __init__(self, count: int) -> None:
        self.hashes = np.zeros(count, dtype=f"V{HASH}")
        self.masks = np.zeros(count, dtype=f"V{HASH}")
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
    if data.masks is not None or data.time_steps is not None or data.train.images is not None:
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
    if isinstance(split.inputs, RecordedFrames):
        look.hashes[i] = np.void(split.inputs.hash_of(i)[:HASH])
    elif split.scans is not None:
        image, mask = (part.numpy() for part in split.scans.read(i, split.image_size))
        if split.scans.stacked:
            image = image[len(image) // 2]
        look.hashes[i], look.masks[i] = _hash(image.tobytes()), _hash(mask.tobytes())
        look.blank[i] = image.min() == image.max()
    elif split.images is not None:
        look.hashes[i] = _hash(split.images[i].numpy().tobytes())
    else:
        with split.table.open(i) as opened:
            size = opened.size
            if not whole:
                opened.draft(None, (_SIDE, _SIDE))
            decoded = convert(opened, split.in_chans)
        look.hashes[i] = _hash(f"{size}".encode() + decoded.tobytes())
    look.sizes[i] = split.image_size[::-1]


def _hash(content: bytes) -> np.void:
    return np.void(hashlib.blake2b(content, digest_size=HASH).digest())


def _images(data: ImageData, looks: dict[str, _Look]) -> contents.Images:
    nothing = {name: np.zeros(len(look.sizes), dtype=np.int64) for name, look in looks.items()}
    return contents.Images(
        data.classes,
        {split.name: split.table for split in data.splits},
        {name: Survey(look.hashes, look.sizes, nothing[name], {}) for name, look in looks.items()},
        {name: np.full(len(look.sizes), name) for name, look in looks.items()},
    )


def _add_classes(report: Report, data: ImageData, looks: dict[str, _Look]) -> None:
    """Look at images that have a class."""
    contents.add_copies(report, _images(data, looks))

    def counts(*splits: Split) -> IntArray:
        labels = np.concatenate([split.labels.numpy() for split in splits])
        return np.bincount(labels, minlength=len(data.classes)).astype(np.int64)

    given = [split for split in data.splits if split.origin != "train"]
    learned = counts(*(split for split in data.splits if split.origin == "train"))
    by_split = {"train": learned, **{split.name: counts(split) for split in given}}
    contents.add_unmeasured(report, data.classes, by_split)
    contents.add_uneven(report, data.classes, learned)


def _add_masks(report: Report, data: ImageData, looks: dict[str, _Look]) -> None:
    """Look at images that have masks."""
    from keymix.data.segmentation import check
    from keymix.data.segmentation.survey import ScanSurvey
    from keymix.data.segmentation.table import Seen

    assert data.masks is not None
    found = list(looks.values())
    hashes, masks, sizes, blank = (
        np.concatenate([getattr(look, name) for look in found])
        for name in ("hashes", "masks", "sizes", "blank")
    )
    count = len(hashes)
    survey = ScanSurvey(
        hashes=hashes,
        mask_hashes=masks,
        sizes=sizes,
        pixels=np.zeros((count, len(data.classes)), dtype=np.int64),
        ignored=np.zeros(count, dtype=np.int64),
        area=sizes.prod(axis=1),
        blank=blank,
        seen=[Seen()] * count,
    )
    scans = check.Scans(
        classes=data.classes,
        masks=data.masks,
        channels=data.in_chans,
        grouped=bool(data.facts.grouped),
        images=_images(data, looks),
        survey=survey,
        groups=[
            group
            for split in data.splits
            if split.scans is not None
            for group in split.scans.groups
        ],
    )
    check.add_copies(report, scans)
    check.add_cases(report, scans)
    check.add_unlisted(report, data.unlisted)
    counts = {name: np.array(number) for name, number in (data.facts.class_images or {}).items()}
    check.add_lacking(report, data.classes, counts)
