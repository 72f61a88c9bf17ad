# SPDX-License-Identifier: Apache-2.0
"""Finds images that are frames of sequences, by their names and by their looks together.

Names say it where images share all but a running number. Looks say it where neighbours by that
number are near-duplicates: as good as equal, as under a camera that stands still; or before a
camera that moves, far more alike than images of the same sequence that lie far apart, or clearly so
and the less the farther. Photos that are merely numbered are neither, nor are digits that one hand
wrote one after another: those are alike, but the next no more than the third.

Few images are opened, small: at most 480, whatever the size of the set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from keymix.data.decode import DAMAGE, Encoded, convert
from keymix.data.sample import Row

Grey: TypeAlias = NDArray[np.float64]
Order: TypeAlias = dict[str, list[int]]

SIDE = 32
"""Pixels a side of the small grey pictures that are compared."""
LEAST = 8
"""Images of a sequence at least."""
_LARGE = 100_000  # names of a split
_SHORT = 24  # images of a row below which it has too few that are far apart
_PAIRS = 160  # of neighbours, in all
_FEWEST = 4  # of one sequence where there are many
_OTHERS = 8  # images far apart that a neighbour is compared with
_THIRD = 3  # the image of a row with which the next one is compared
_AHEAD = 0.55  # share of the pairs of neighbours that are more alike than all of these, ...
_ALIKE = 0.4  # ... at this correlation, without what all images of the sequence share
_FADES = 0.57  # or share of those more alike than with the third image, which digits reach, ...
_SOME_ALIKE, _NEARER = 0.25, 0.7  # ... and more than with one far away
_ERRORS = 2.5  # standard errors
_HALF = 0.5  # the same shares of a single sequence, where all of them together belong so
_SAME, _SAME_SHAPE = 0.1, 0.7  # difference over contrast, and correlation, of equal scenes
_FLAT = 2.0  # grey levels of contrast below which a picture shows nothing
_NUMBER = re.compile(r"\d+")


def find_sequences(
    names: Sequence[str],
    parts: Sequence[str],
    picture: Callable[[int], Grey | None],
    *,
    late: Callable[[], bool] = lambda: False,
) -> dict[str, int]:
    """Find the images that are frames of sequences.

    Returns how many images each sequence has, by its name with # for the running number, the
    longest first.
    """
    seen: dict[int, Grey | None] = {}

    def look(i: int) -> Grey | None:
        if i not in seen:
            if late():
                raise TimeoutError
            seen[i] = picture(i)
        return seen[i]

    for order in _orders(names, parts):
        found = _judge(order, look)
        if found:
            most = sorted(found, key=lambda name: (-len(order[name]), name))
            return {name: len(order[name]) for name in most}
    return {}


def sequences_of(
    row: Callable[[int], Row],
    parts: Sequence[str],
    *,
    late: Callable[[], bool] = lambda: False,
) -> dict[str, int]:
    """Find the samples that are frames of sequences, whatever split they are in."""
    of_part = [np.flatnonzero(np.asarray(parts) == name)[:_LARGE] for name in dict.fromkeys(parts)]
    places = np.concatenate(of_part).tolist()
    rows = {k: row(k) for k in places}

    def picture(i: int) -> Grey | None:
        image = rows[places[i]].image
        if not isinstance(image, Encoded):
            return None
        try:
            with image.open() as opened:
                opened.draft(None, (SIDE, SIDE))
                return small(convert(opened, 1))
        except DAMAGE:
            return None  # it is reported by itself

    names = [rows[k].name for k in places]
    return find_sequences(names, [str(parts[k]) for k in places], picture, late=late)


def small(image: Image.Image) -> Grey:
    """Make a small grey picture of a decoded image of 8 bits.

    Shape: any size -> ``[32, 32]``, 0..255.
    """
    grey = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(grey, dtype=np.float64)


def _orders(names: Sequence[str], parts: Sequence[str]) -> Iterator[Order]:
    """Yield ways to put images in rows by the numbers in their names: each a row by its name.

    By the last number; images that are in no row then by all of their numbers, as in times of day,
    and by the first. Sorted by all numbers, images of one source would stand next to each other,
    which is no sign of a sequence.
    """
    left = set(range(len(names)))
    for which in ("last", "all", "first"):
        rows: dict[str, list[tuple[Any, str, int]]] = {}
        for i, name in enumerate(names):
            if i not in left:
                continue
            folder, slash, file = name.rpartition("/")
            numbers = list(_NUMBER.finditer(file))
            if not numbers:
                continue
            chosen = {"last": numbers[-1:], "all": numbers, "first": numbers[:1]}[which]
            pattern, end = "", 0
            for number in chosen:
                pattern += file[end : number.start()] + "#"
                end = number.end()
            position = tuple(int(number.group()) for number in chosen)
            rows.setdefault(f"{folder}{slash}{pattern}{file[end:]}", []).append(
                (position, parts[i], i)
            )
        order: Order = {}
        for name, row in rows.items():
            if len({position for position, _, _ in row}) == len(row):
                order[name] = [i for _, _, i in sorted(row)]
                continue
            for part in sorted({part for _, part, _ in row}):  # each split counts for itself
                order[f"{part}/{name}"] = [i for _, of, i in sorted(row) if of == part]
        order = {name: row for name, row in order.items() if len(row) >= LEAST}
        if which == "last":
            left -= {i for row in order.values() for i in row}
        if order:
            yield order


@dataclass(frozen=True)
class _Looks:
    """What was seen of pairs of neighbours of one row, each ``[P]``."""

    alike: Grey  # correlation without what the row's pictures share
    ahead: Grey  # whether they are more alike than the first with any of some images far away
    nearer: Grey  # share of those that they are ahead of
    fades: Grey  # whether they are more alike than the first with the third
    same: Grey
    shape: Grey  # correlation of the whole pictures

    def together(self, least: float | None = None) -> bool:
        """Whether the pairs are near-duplicates, by a camera that stands still or one that moves.

        Equal images are copies, and no sign of a sequence.
        """
        count = len(self.alike)
        if count < LEAST // 2:
            return False
        alike = float(np.median(self.alike))
        moves = alike >= _ALIKE and _share(self.ahead, least, _AHEAD)
        some = alike >= _SOME_ALIKE and float(self.nearer.mean()) >= _NEARER
        fades = some and _share(self.fades, least, _FADES)
        still = 0 < np.median(self.same) <= _SAME and np.median(self.shape) >= _SAME_SHAPE
        return bool(still or moves or fades)


def _share(which: Grey, least: float | None, bound: float) -> bool:
    """Whether a share is ``least``, or above a bound by more than chance makes it."""
    share, count = float(which.mean()), len(which)
    error = math.sqrt(max(share * (1 - share), 1 / count) / count)
    return share >= (bound + _ERRORS * error if least is None else least)


def _judge(order: Order, look: Callable[[int], Grey | None]) -> list[str]:
    """Name the rows whose neighbours belong together: all rows at once, or each by itself.

    Short rows have too few images far apart; they are compared with each other instead.
    """
    longest = sorted(order, key=lambda name: (-len(order[name]), name))[: _PAIRS // _FEWEST]
    rows = {name: _opened(order[name], _PAIRS // len(longest), look) for name in longest}
    looks = {name: _looks(row) for name, row in rows.items()}
    if _joined(list(looks.values())).together():
        few = {name for name in order if name not in looks or len(looks[name].alike) < LEAST}
        return [name for name in order if name in few or looks[name].together(_HALF)]
    found = {name for name, seen in looks.items() if seen.together()}
    short = [row for row in rows.values() if row.count < _SHORT and len(row.coarse)]
    if len(short) > 1:
        every = np.concatenate([row.coarse for row in short])
        if _joined([_looks(row, every) for row in short]).together():
            found |= {name for name, row in order.items() if len(row) < _SHORT}
    return sorted(found)


def _joined(looks: Sequence[_Looks]) -> _Looks:
    return _Looks(
        *(np.concatenate([getattr(each, field.name) for each in looks]) for field in fields(_Looks))
    )


@dataclass(frozen=True)
class _Row:
    """Pictures of a row: neighbours and thirds of some, evenly over it."""

    count: int
    starts: list[int]
    here: NDArray[np.int64]  # places of the pictures, ``[N]``
    whole: Grey  # the pictures with mean 0 and length 1, ``[N, 1024]``
    coarse: Grey  # the same of 16 pixels per side, ``[N, 256]``


def _opened(row: Sequence[int], pairs: int, look: Callable[[int], Grey | None]) -> _Row:
    last = len(row) - 1 - _THIRD
    starts = np.unique(np.linspace(0, last, min(pairs, last + 1)).astype(np.int64))
    places = np.unique(np.concatenate([starts, starts + 1, starts + _THIRD])).tolist()
    opened = {int(at): look(row[at]) for at in places}
    shown = {at: grey for at, grey in opened.items() if grey is not None and grey.std() >= _FLAT}
    here = np.array(sorted(shown), dtype=np.int64)
    pictures = [shown[at].ravel() for at in here.tolist()]
    whole = _unit(np.array(pictures).reshape(-1, SIDE * SIDE))
    half = SIDE // 2
    coarse = whole.reshape(-1, half, 2, half, 2).mean(axis=(2, 4)).reshape(-1, half * half)
    return _Row(len(row), starts.tolist(), here, whole, coarse)


def _looks(row: _Row, every: Grey | None = None) -> _Looks:
    """Compare neighbours of a row with each other and with images far from them."""
    shared = (row.coarse if every is None else every).mean(axis=0) if len(row.here) else 0.0
    own = _unit(row.coarse - shared)
    others = None if every is None else _unit(every[_evenly(len(every))] - shared)
    at = {int(place): k for k, place in enumerate(row.here.tolist())}
    found: list[tuple[float, ...]] = []
    for start in row.starts:
        a, b, c = (at.get(start + step) for step in (0, 1, _THIRD))
        far = np.flatnonzero(np.abs(row.here - start) >= max(2, row.count // 4))
        if a is None or b is None or c is None or (others is None and len(far) < 2):
            continue
        away = (own[far[_evenly(len(far))]] if others is None else others) @ own[a]
        alike = float(own[a] @ own[b])
        found.append(
            (
                alike,
                bool(others is None and (alike > away).all()),
                float((alike > away).mean()),
                bool(alike > own[a] @ own[c]),
                float(np.quantile(np.abs(row.whole[a] - row.whole[b]), 0.9)) * SIDE,
                float(row.whole[a] @ row.whole[b]),
            )
        )
    return _Looks(*np.array(found, dtype=np.float64).reshape(-1, len(fields(_Looks))).T)


def _evenly(count: int) -> NDArray[np.int64]:
    """Choose up to eight places, evenly over all."""
    return np.linspace(0, count - 1, min(_OTHERS, count)).astype(np.int64)


def _unit(rows: Grey) -> Grey:
    """Take the mean off each row and give it length 1; rows of one value become 0."""
    rows = rows - rows.mean(axis=1, keepdims=True)
    length: Grey = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Grey = rows / np.maximum(length, 1e-9)
    return unit
