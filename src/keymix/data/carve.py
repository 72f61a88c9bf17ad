# SPDX-License-Identifier: Apache-2.0
"""Which rows of a source become train, validation and test."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keymix.data.sources.base import Source, Table, some
from keymix.data.splits import choose, rest
from keymix.data.streams import IntArray, Stream
from keymix.errors import UserError

_TEST_SEED = 0  # the test split is one and the same whatever the split seed


@dataclass(frozen=True)
class Part:
    """Some rows of a source's table, ascending.

    Args:
        origin: The table: the source's train, val or test.
        table: The table itself.
        rows: The rows.
    """

    origin: str
    table: Table
    rows: IntArray

    @property
    def labels(self) -> IntArray:
        """Class numbers of the rows."""
        return self.table.labels[self.rows]

    def keep(self, chosen: IntArray) -> Part:
        """Keep the rows at the positions ``chosen``."""
        return replace(self, rows=self.rows[chosen])

    def without(self, chosen: IntArray) -> Part:
        """Keep the rows at all positions but ``chosen``."""
        return self.keep(rest(len(self.rows), chosen))


def carve(
    source: Source, spec: str, limit: int | None, val_fraction: float, seed: int
) -> tuple[dict[str, Part], list[str]]:
    """Choose the rows of train, val and test.

    Args:
        source: Where the images come from.
        spec: The data spec as typed, for messages.
        limit: Most rows of train and val together, and of test; None for all.
        val_fraction: Share of train that becomes val.
        seed: Seed of the choice of val, and of train under a limit.

    Returns:
        The parts by name, and notes for the record.

    Raises:
        UserError: If ``limit`` is below two images a class, or no image is left for val or test.
    """
    notes = list(source.notes)
    train = _whole("train", source.train)
    val = _whole("val", source.val) if source.val is not None else None
    if source.test is not None:
        test = _whole("test", source.test)
    elif val is not None:
        test, val = val, None
        notes.append("test = the source's validation split; validation carved from train")
    else:
        number = max(1, round(source.test_fraction * len(train.rows)))
        chosen = choose(train.labels, number, seed=_TEST_SEED, stream=Stream.TEST, leave_one=True)
        train, test = train.without(chosen), train.keep(chosen)
        notes.append(f"test = {len(chosen)} {source.items} carved from train, stratified, fixed")

    if limit is not None:
        least = 2 * len(np.unique(train.labels))  # one to learn from and one to validate on
        if limit < least:
            raise UserError(f"{limit=} is below two {source.items} a class. Give at least {least}.")
        test = test.keep(choose(test.labels, limit, seed=_TEST_SEED, stream=Stream.LIMIT))
    budget = len(train.rows) if limit is None else min(limit, len(train.rows))
    number = max(1, round(val_fraction * budget))
    if val is not None:
        notes.append("validation = the source's validation split")
        if limit is not None:
            val = val.keep(choose(val.labels, number, seed=seed, stream=Stream.LIMIT))
            budget = max(0, min(limit - len(val.rows), len(train.rows)))
    if budget < len(train.rows):
        train = train.keep(choose(train.labels, budget, seed=seed, stream=Stream.LIMIT))
    if val is None:
        counts = np.bincount(train.labels, minlength=len(source.classes))
        single = [source.classes[i] for i in np.flatnonzero(counts == 1)]
        if single:
            notes.append(
                f"not validated on, for want of a second {source.items[:-1]}: {some(single)}"
            )
        chosen = choose(train.labels, number, seed=seed, stream=Stream.VALIDATION, leave_one=True)
        train, val = train.without(chosen), train.keep(chosen)
    for name, part in (("train", train), ("validation", val), ("test", test)):
        if not len(part.rows):
            raise UserError(
                f"data {spec}: too few {source.items} a class: none is left for {name}. Add "
                f"{source.items}."
            )
    return {"train": train, "val": val, "test": test}, notes


def _whole(origin: str, table: Table) -> Part:
    return Part(origin, table, np.arange(len(table), dtype=np.int64))
