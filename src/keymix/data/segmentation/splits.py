# SPDX-License-Identifier: Apache-2.0
"""Train, validation and test of images with masks: cases stay whole, or slices are shared out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from keymix.data.carve import Part
from keymix.data.segmentation.table import ScanSource, ScanTable
from keymix.data.sources.base import Faults, some
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

_TEST_SEED = 0  # the test split is one and the same whatever the split seed


def carve_scans(
    source: ScanSource,
    spec: str,
    *,
    split_by: str = "case",
    test_fraction: float | None = None,
    val_fraction: float = 1 / 6,
    seed: int = 0,
    limit: int | None = None,
) -> tuple[dict[str, Part], list[str]]:
    """Choose the rows of train, val and test.

    Splits that the data bring are kept. Of others, test is carved from all, always the same, and
    validation from the rest.

    Args:
        source: Where the images come from.
        spec: The data spec as typed, for messages.
        split_by: ``case`` keeps the images of a case together, ``slice`` does not.
        test_fraction: Share of the images that becomes test; None for the source's own.
        val_fraction: Share of the rest that becomes val.
        seed: Seed of the choice of val, and of images under a limit.
        limit: Most images of train and val together, and of test; None for all. Images are chosen
            within their splits, so no case changes its split.

    Returns:
        The parts by name, and notes for the record.

    Raises:
        UserError: If there are too few cases or images, or a share is asked for that the data have
            fixed.
    """
    notes = list(source.notes)
    parts = {
        name: Part(name, table, np.arange(len(table), dtype=np.int64))
        for name, table in source.tables.items()
    }
    if "test" in parts or "val" in parts:
        if test_fraction is not None:
            raise UserError(
                f"data.test_fraction = {test_fraction!r}: data {spec} have a test split of their "
                "own. Leave it out."
            )
        if "test" not in parts:
            parts["test"] = parts.pop("val")
            notes.append("test = the source's validation split; validation carved from train")
    wanted = [name for name in ("test", "val") if name not in parts]
    unit = "case" if split_by == "case" and source.grouped else "image"
    least = 1 + len(wanted)
    found = len(set(_groups(source.train, parts["train"].rows, unit)))
    if found < least:
        raise UserError(
            f"data {spec}: {found} {unit}{'' if found == 1 else 's'} to make train"
            f"{', val' if 'val' in wanted else ''}{' and test' if 'test' in wanted else ''} of; "
            f"{least} are needed. Add some"
            + (", or take data.split_by=slice." if unit == "case" else ".")
        )
    share = source.test_fraction if test_fraction is None else test_fraction
    for name in wanted:
        train = parts["train"]
        chosen = choose_groups(
            _groups(source.train, train.rows, unit),
            share if name == "test" else val_fraction,
            seed=_TEST_SEED if name == "test" else seed,
            stream=Stream.TEST if name == "test" else Stream.VALIDATION,
            leave=2 if name == "test" else 1,
        )
        parts["train"], parts[name] = train.without(chosen), train.keep(chosen)
    if "test" in wanted:
        count = len(parts["test"].rows)
        notes.append(f"test = {count} image{'s' * (count != 1)} carved from train, fixed")
    if "val" not in wanted:
        notes.append("validation = the source's validation split")
    if limit is not None:
        parts = _limited(parts, limit, seed)
    return {name: parts[name] for name in ("train", "val", "test")}, notes


def choose_groups(
    groups: Sequence[str], share: float, *, seed: int, stream: Stream, leave: int = 1
) -> IntArray:
    """Choose whole groups so that they hold about a share of the rows.

    Groups are gone through in the order of a hash of their names and the seed. One is taken if that
    brings the number of rows nearer to the one wanted; if none would, the smallest is.

    Args:
        groups: The group of each row.
        share: Share of the rows wanted.
        seed: The seed of the split.
        stream: What the choice is for.
        leave: Groups that stay untaken at least.

    Returns:
        The rows of the groups taken, ascending.
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


def tell_shared(tables: Mapping[str, ScanTable], faults: Faults) -> None:
    """Tell each case that stands in several of the splits that a data set brings.

    Raises:
        UserError: On the first, unless faults are collected.
    """
    first: dict[str, tuple[str, str]] = {}
    told = set()
    for name, table in tables.items():
        for i, group in enumerate(table.groups):
            split, where = first.setdefault(group, (name, table.name(i)))
            if split != name and group not in told:
                told.add(group)
                faults.tell(
                    "case in two splits",
                    group,
                    f"case {group!r} is in {split} ({where}) and in {name} ({table.name(i)}): what "
                    "is learned of it would be tested on it. Keep it in one split, or split by "
                    "slice: data.split_by=slice.",
                )


def _groups(table: ScanTable, rows: IntArray, unit: str) -> list[str]:
    """Tell the group of rows, or a name of each row's own."""
    if unit == "case":
        return [table.groups[i] for i in rows]
    return [f"{table.groups[i]}/{table.scan_id(i)}" for i in rows.tolist()]


def _limited(parts: dict[str, Part], limit: int, seed: int) -> dict[str, Part]:
    """Keep some images of each split: by hash, the shares of train and val as they are.

    Train and val keep one each at least, however large the other is.
    """
    if limit < 2:
        raise UserError(f"{limit=} is below two images, one to learn from and one to validate on.")
    train, val, test = (len(parts[name].rows) for name in ("train", "val", "test"))
    of_val = min(val, limit - 1, max(1, round(limit * val / (train + val))))
    numbers = {"train": min(train, limit - of_val), "val": of_val, "test": min(test, limit)}
    kept = {}
    for name, part in parts.items():
        assert isinstance(part.table, ScanTable)
        names = _groups(part.table, part.rows, "image")
        stream_seed = _TEST_SEED if name == "test" else seed
        order = np.argsort(hash64(stream_seed, Stream.LIMIT, keys(names)), kind="stable")
        kept[name] = part.keep(np.sort(order[: numbers[name]]).astype(np.int64))
    return kept


def cases_note(parts: dict[str, Part]) -> list[str]:
    """Tell which cases are in several splits, as splitting by slice makes it."""
    of: dict[str, set[str]] = {}
    for name, part in parts.items():
        assert isinstance(part.table, ScanTable)
        for i in part.rows.tolist():
            of.setdefault(part.table.groups[i], set()).add(name)
    shared = sorted(group for group, names in of.items() if len(names) > 1)
    if not shared:
        return []
    return [f"split by slice: {len(shared)} cases are in several splits ({some(shared)})"]
