# SPDX-License-Identifier: Apache-2.0
"""Leaves broken images out, after the splits were chosen, and remembers which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keymix.data.record import LeftOutImage
from keymix.data.sources.base import Source, Table, some
from keymix.data.splits import Part
from keymix.data.streams import IntArray
from keymix.errors import UserError

_NAMED = 50  # images left out that a record names


@dataclass(frozen=True)
class LeftOut:
    """A broken image."""

    split: str  # the split it was meant for
    row: int  # its row in the source's table
    stratum: int  # its class number, or whatever it was chosen by
    id: str  # where it comes from: a file, or a file and a row
    reason: str  # what is wrong with it


def drop_corrupt(
    parts: Mapping[str, Part],
    tables: Mapping[str, Table],
    source: Source,
    spec: str,
    *,
    find: Callable[[str, Table], Mapping[int, str]],
) -> tuple[dict[str, Part], dict[str, Table], list[LeftOut]]:
    """Drop the inputs that are broken.

    The splits stay as they were chosen, so a broken file moves no other image.

    Returns parts and tables of what is left, and what was left out.
    """
    left_parts, left_tables, left_out = dict(parts), dict(tables), []
    for name, table in tables.items():
        reasons = find(name, table)
        if not reasons:
            continue
        part, strata = parts[name], table.targets.strata
        left_out += [
            LeftOut(name, int(part.rows[i]), int(strata[i]), table.name(i), why)
            for i, why in reasons.items()
        ]
        left_parts[name] = part.without(np.fromiter(reasons, dtype=np.int64))
        if not len(left_parts[name].rows):
            raise UserError(
                f"data {spec}: all {source.items} of {name} are broken: {_example(left_out, name)}."
            )
        left_tables[name] = part.table.select(left_parts[name].rows)
    gone = np.setdiff1d(parts["train"].strata, left_parts["train"].strata)
    if len(gone):
        names = some([repr(source.classes[i]) for i in gone])
        raise UserError(
            f"data {spec}: class {names} has no training {source.items} left, all are broken "
            f"({_example(left_out, 'train', int(gone[0]))}). Replace them, or remove the class."
        )
    return left_parts, left_tables, left_out


def left_out_note(left_out: Sequence[LeftOut], source: Source) -> list[str]:
    """Say how many images were left out, by split; nothing if none were."""
    if not left_out:
        return []
    counts = [
        f"{sum(each.split == name for each in left_out)} of {name}"
        for name in dict.fromkeys(each.split for each in left_out)
    ]
    return [f"broken {source.items} left out: {', '.join(counts)}"]


def named_left_out(left_out: Sequence[LeftOut]) -> tuple[LeftOutImage, ...]:
    """Name the first images left out, as a record does."""
    return tuple(LeftOutImage(id=each.id, reason=each.reason) for each in left_out[:_NAMED])


def rows_left_out(left_out: Sequence[LeftOut]) -> dict[str, IntArray]:
    """List the rows left out, by split."""
    names = {each.split for each in left_out}
    return {
        name: np.asarray([each.row for each in left_out if each.split == name], dtype=np.int64)
        for name in names
    }


def _example(left_out: Sequence[LeftOut], split: str, stratum: int | None = None) -> str:
    """Name the first image left out of a split, or of one class there."""
    of = (each for each in left_out if each.split == split and stratum in (None, each.stratum))
    first = next(of)
    return f"{first.id}: {first.reason}"
