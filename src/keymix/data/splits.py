# SPDX-License-Identifier: Apache-2.0
"""Which rows become train, validation and test.

The choice is the same for ever: a function of strata or groups, number and seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from keymix.data.kinds import CLASS, TargetKind
from keymix.data.sample import SPLITS, Row, Source, some
from keymix.data.sample import select as select_rows
from keymix.data.specs import SPLIT_BY, Options
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

_TEST_SEED = 0  # the test split is one and the same whatever the split seed


@dataclass(frozen=True, eq=False)
class Table:
    """What choices depend on of all rows of a source, ``[N]`` each."""

    split: NDArray[np.str_]  # train, val or test
    strata: IntArray  # class numbers; 0 where targets are others
    groups: NDArray[np.object_]
    keys: Sequence[str]  # what choices by hash are made by; none where rows have no groups
    by_class: bool  # whether strata are classes

    @classmethod
    def of(cls, rows: Sequence[Row], target: TargetKind = CLASS) -> Table:
        """Collect it, in one pass: very many rows are built one by one."""
        by_class = target is CLASS
        split = np.empty(len(rows), dtype="<U5")
        groups = np.empty(len(rows), dtype=object)
        strata = np.zeros(len(rows), dtype=np.int64)
        keys = []
        for i, row in enumerate(rows):
            split[i], groups[i] = row.split or "train", row.group
            if by_class:
                strata[i] = row.target
            if row.group:
                keys.append(row.key)
        return cls(split, strata, groups, keys, by_class)


@dataclass(frozen=True)
class Part:
    """Some rows of a source's table of one split, ascending."""

    origin: str  # the table: the source's train, val or test
    whole: Table
    rows: IntArray  # their numbers in that table

    @property
    def index(self) -> IntArray:
        """Their numbers among all rows of the source."""
        return np.flatnonzero(self.whole.split == self.origin)[self.rows]

    @property
    def strata(self) -> IntArray:
        """The strata of the rows, such as class numbers."""
        return self.whole.strata[self.index]

    def names(self, *, by_group: bool) -> list[str]:
        """Name the group of each row, or each row."""
        named = self.whole.groups if by_group else np.array(self.whole.keys, dtype=object)
        return [str(each) for each in named[self.index]]

    def keep(self, chosen: IntArray) -> Part:
        """Keep the rows at the positions ``chosen``."""
        return replace(self, rows=self.rows[chosen])

    def without(self, chosen: IntArray) -> Part:
        """Keep the rows at all positions but ``chosen``."""
        return self.keep(rest(len(self.rows), chosen))

    def select(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Take the rows themselves."""
        return select_rows(rows, self.index)


def make_splits(
    source: Source, table: Table, spec: str, options: Options
) -> tuple[dict[str, Part], list[str]]:
    """Choose the rows of train, val and test.

    Splits that the data bring are kept. Where rows have groups, these stay whole; otherwise every
    stratum gets its share of every split.

    Returns the parts by name, and notes for the record.
    """
    origins = [name for name in SPLITS if (table.split == name).any()]
    if "train" not in origins and source.stream is None:
        raise UserError(f"data {spec}: no {source.items} to learn from. Add some to train.")
    parts = {
        name: Part(name, table, np.arange(int((table.split == name).sum()), dtype=np.int64))
        for name in origins
    }
    notes = list(source.notes)
    if source.stream is not None:
        return parts, notes
    if table.keys and options.test_fraction is not None and len(parts) > 1:
        raise UserError(
            f"data.test_fraction = {options.test_fraction!r}: data {spec} have a test split of "
            "their own. Leave it out."
        )
    if "val" in parts and "test" not in parts:
        parts["test"] = parts.pop("val")
        notes.append("test = the source's validation split; validation split off from train")
    choose_rows = _grouped if table.keys else _stratified
    return choose_rows(source, parts, spec, options, notes)


def _stratified(
    source: Source, parts: dict[str, Part], spec: str, options: Options, notes: list[str]
) -> tuple[dict[str, Part], list[str]]:
    """Choose rows so that every stratum has its share; targets but classes are one stratum."""
    limit, seed = options.limit, options.split_seed
    train, val = parts["train"], parts.get("val")
    by_class = train.whole.by_class
    if "test" in parts:
        test = parts["test"]
    else:
        number = max(1, round(source.test_fraction * len(train.rows)))
        chosen = choose(train.strata, number, seed=_TEST_SEED, stream=Stream.TEST, leave_one=True)
        train, test = train.without(chosen), train.keep(chosen)
        how = "stratified, fixed" if by_class else "fixed"
        notes.append(f"test = {len(chosen)} {source.items} split off from train, {how}")

    if limit is not None:
        least = 2 * len(np.unique(train.strata))  # one to learn from and one to validate on
        if limit < least:
            each = " per class" if by_class else ""
            raise UserError(f"{limit=} is below two {source.items}{each}. Give at least {least}.")
        test = test.keep(choose(test.strata, limit, seed=_TEST_SEED, stream=Stream.LIMIT))
    budget = len(train.rows) if limit is None else min(limit, len(train.rows))
    number = max(1, round(options.val_fraction * budget))
    if val is not None:
        notes.append("validation = the source's validation split")
        if limit is not None:
            val = val.keep(choose(val.strata, number, seed=seed, stream=Stream.LIMIT))
            budget = max(0, min(limit - len(val.rows), len(train.rows)))
    if budget < len(train.rows):
        train = train.keep(choose(train.strata, budget, seed=seed, stream=Stream.LIMIT))
    if val is None:
        names = source.classes if by_class else ()
        counts = np.bincount(train.strata, minlength=len(names))
        single = [name for name, count in zip(names, counts, strict=False) if count == 1]
        if single:
            notes.append(
                f"not validated on, for want of a second {source.kind.noun}: {some(single)}"
            )
        chosen = choose(train.strata, number, seed=seed, stream=Stream.VALIDATION, leave_one=True)
        train, val = train.without(chosen), train.keep(chosen)
    for name, part in (("train", train), ("validation", val), ("test", test)):
        if not len(part.rows):
            raise UserError(
                f"data {spec}: too few {source.items}{' per class' * by_class}: none "
                f"is left for {name}. Add {source.items}."
            )
    return {"train": train, "val": val, "test": test}, notes


def _grouped(
    source: Source, parts: dict[str, Part], spec: str, options: Options, notes: list[str]
) -> tuple[dict[str, Part], list[str]]:
    """Choose whole groups: test is taken from all, always the same, and val from the rest."""
    test_fraction = options.test_fraction
    by_group = options.split_by in (None, SPLIT_BY[0])
    wanted = [name for name in ("test", "val") if name not in parts]
    by_group = by_group and source.grouped
    least = 1 + len(wanted)
    found = len(set(parts["train"].names(by_group=by_group)))
    if found < least:
        unit = "case" if by_group else source.kind.noun
        raise UserError(
            f"data {spec}: {found} {unit}{'' if found == 1 else 's'} to make train"
            f"{', val' if 'val' in wanted else ''}{' and test' if 'test' in wanted else ''} of; "
            f"{least} are needed. Add some"
            + (", or take data.split_by=slice." if by_group else ".")
        )
    share = source.test_fraction if test_fraction is None else test_fraction
    for name in wanted:
        train = parts["train"]
        chosen = choose_groups(
            train.names(by_group=by_group),
            share if name == "test" else options.val_fraction,
            seed=_TEST_SEED if name == "test" else options.split_seed,
            stream=Stream.TEST if name == "test" else Stream.VALIDATION,
            leave=2 if name == "test" else 1,
        )
        parts["train"], parts[name] = train.without(chosen), train.keep(chosen)
    if "test" in wanted:
        count = len(parts["test"].rows)
        items = source.kind.noun if count == 1 else source.items
        notes.append(f"test = {count} {items} split off from train, fixed")
    if "val" not in wanted:
        notes.append("validation = the source's validation split")
    if options.limit is not None:
        parts = _limited(parts, options.limit, options.split_seed, source.items)
    if not by_group:
        notes += _shared_note(parts)
    return {name: parts[name] for name in SPLITS}, notes


def _limited(parts: dict[str, Part], limit: int, seed: int, items: str) -> dict[str, Part]:
    """Keep some rows of each split: by hash, the shares of train and val as they are.

    Train and val keep one each at least, however large the other is.
    """
    if limit < 2:
        raise UserError(f"{limit=} is below two {items}, one to learn from and one to validate on.")
    train, val, test = (len(parts[name].rows) for name in ("train", "val", "test"))
    of_val = min(val, limit - 1, max(1, round(limit * val / (train + val))))
    numbers = {"train": min(train, limit - of_val), "val": of_val, "test": min(test, limit)}
    kept = {}
    for name, part in parts.items():
        stream_seed = _TEST_SEED if name == "test" else seed
        hashes = hash64(stream_seed, Stream.LIMIT, keys(part.names(by_group=False)))
        order = np.argsort(hashes, kind="stable")
        kept[name] = part.keep(np.sort(order[: numbers[name]]).astype(np.int64))
    return kept


def _shared_note(parts: dict[str, Part]) -> list[str]:
    """Say which groups are in several splits, as splitting by slice makes it."""
    of: dict[str, set[str]] = {}
    for name, part in parts.items():
        for group in part.names(by_group=True):
            of.setdefault(group, set()).add(name)
    shared = sorted(group for group, names in of.items() if len(names) > 1)
    if not shared:
        return []
    return [f"split by slice: {len(shared)} cases are in several splits ({some(shared)})"]


STATISTICS_SAMPLE = 2000
LARGE = 100_000  # images: of a larger table, headers and contents are read of a sample only


def choose(
    labels: IntArray, number: int, *, seed: int, stream: Stream, leave_one: bool = False
) -> IntArray:
    """Choose rows so that every class has its share.

    Shares are proportional (largest remainders, ties by hash); where ``number`` allows, every class
    gets at least one row. Within a class the rows of the smallest hashes are taken.

    Returns the rows taken, ascending.
    """
    if len(labels) == 0:
        return np.zeros(0, dtype=np.int64)
    counts = np.bincount(labels)
    quota = _quotas(counts, number, counts - leave_one, hash64(seed, stream, -1, _arange(counts)))
    order = np.lexsort((hash64(seed, stream, _arange(labels)), labels))
    first = np.cumsum(counts) - counts
    rank = np.arange(len(labels)) - first[labels[order]]
    return np.sort(order[rank < quota[labels[order]]]).astype(np.int64)


def choose_groups(
    groups: Sequence[str], share: float, *, seed: int, stream: Stream, leave: int = 1
) -> IntArray:
    """Choose whole groups so that they hold about a share of the rows.

    Groups are gone through in the order of a hash of their names and the seed. One is taken if that
    brings the number of rows nearer to the one wanted; if none would, the smallest is.

    Returns the rows of the groups taken, ascending.
    """
    names, index, counts = np.unique(
        np.asarray(groups, dtype=object), return_inverse=True, return_counts=True
    )
    order = np.argsort(hash64(seed, stream, keys(names.tolist())), kind="stable")
    wanted = share * len(groups)
    taken = np.zeros(len(names), dtype=bool)
    have = 0
    for group in order.tolist():
        if int(taken.sum()) >= len(names) - leave:
            break
        count = int(counts[group])
        if abs(have + count - wanted) < abs(have - wanted):
            taken[group] = True
            have += count
    if not have:
        taken[order[np.argmin(counts[order])]] = True
    return np.flatnonzero(taken[index]).astype(np.int64)


def keys(names: Sequence[str]) -> IntArray:
    """Make a number of each name, the same for ever."""
    digests = [hashlib.sha256(name.encode()).digest()[:8] for name in names]
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def rest(count: int, taken: IntArray) -> IntArray:
    """List the rows of ``count`` that are not in ``taken``, ascending."""
    keep = np.ones(count, dtype=bool)
    keep[taken] = False
    return np.flatnonzero(keep).astype(np.int64)


def digest(origin: str, rows: IntArray) -> str:
    """Hash an index list: sha256 of the table's name and the row numbers, little-endian int64."""
    return hashlib.sha256(origin.encode() + b"\n" + rows.astype("<i8").tobytes()).hexdigest()


def _arange(like: IntArray) -> IntArray:
    return np.arange(len(like), dtype=np.int64)


def _quotas(counts: IntArray, number: int, caps: IntArray, ties: NDArray[np.uint64]) -> IntArray:
    caps = np.maximum(caps, 0)
    number = min(number, int(caps.sum()))
    exact = counts * (number / max(1, int(counts.sum())))
    quota: IntArray = np.minimum(np.floor(exact).astype(np.int64), caps)
    while (missing := number - int(quota.sum())) > 0:
        open_ = np.flatnonzero(quota < caps)
        by_need = open_[np.lexsort((ties[open_], quota[open_] - exact[open_]))]
        quota[by_need[:missing]] += 1
    if number >= np.count_nonzero(caps):  # a row for every class that can give one
        for poor in np.flatnonzero((quota == 0) & (caps > 0)):
            quota[np.argmax(np.where(quota > 1, quota - exact, -np.inf))] -= 1
            quota[poor] = 1
    return quota


def is_large(count: int) -> bool:
    """Whether headers and contents of this number of images are read of a sample only."""
    return count > LARGE


def sample(count: int) -> IntArray:
    """Choose up to 2,000 of ``count`` positions, always the same, ascending."""
    rows = np.arange(count, dtype=np.int64)
    order = np.argsort(hash64(0, Stream.STATISTICS, rows), kind="stable")
    return np.sort(order[:STATISTICS_SAMPLE]).astype(np.int64)
