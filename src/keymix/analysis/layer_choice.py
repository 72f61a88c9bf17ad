# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are meant: numbers, ranges, patterns on paths, what stands above some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from keymix.errors import UserError, unknown

Layers = str | int | Sequence[str | int]
_NUMBERS = re.compile(r"(-?\d+)(?:\s*-\s*(\d+))?")


def chosen_numbers(
    names: Sequence[Sequence[str]], layers: Layers | None, what: str = "layers"
) -> list[int]:
    """Return the numbers of the layers meant, in the model's order.

    Args:
        names: The paths that each layer of the model goes by, the first of which errors name.
        layers: None for all; a number (0 is the first, -1 the last); text with commas between
            numbers, ranges ``"6-11"`` (both ends count), shell-style patterns on module paths
            (``"blocks.[0-5].attn"``) and what stands above some (``"stages.2"``); or a list of
            these.
        what: What errors call the layers.

    Raises:
        UserError: If one of them matches nothing; it names the nearest paths.
    """
    if layers is None:
        return list(range(len(names)))
    wanted: set[int] = set()
    several = [layers] if isinstance(layers, str) or not isinstance(layers, Sequence) else layers
    for given in several:
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise UserError(
                f"layers={given!r} must be a number, a range such as '6-11' or a pattern on paths"
            )
        for part in str(given).split(","):
            wanted.update(_meant(names, part.strip(), what))
    if not wanted:
        raise UserError(f"{layers=} names no layer; leave it out for all {len(names)}")
    return sorted(wanted)


def _meant(names: Sequence[Sequence[str]], text: str, what: str) -> Sequence[int]:
    numbers = _NUMBERS.fullmatch(text)
    if numbers is None:
        hits = _where(names, lambda path: fnmatchcase(path, text)) or _where(
            names, lambda path: path.startswith(f"{text}.")
        )
        if not hits:
            raise unknown("layer", text, [paths[0] for paths in names], listed=False)
        return hits
    count, ends = len(names), [int(end) for end in numbers.groups() if end is not None]
    if not all(-count <= end < count for end in ends):
        raise UserError(
            f"layers={text!r}: this model has {count} {what}, 0 ({names[0][0]}) to {count - 1} "
            f"({names[-1][0]})"
        )
    first, last = ends[0] % count, ends[-1] % count
    if last < first:
        raise UserError(f"layers={text!r} runs backwards; write '{last}-{first}'")
    return range(first, last + 1)


def _where(names: Sequence[Sequence[str]], fits: Callable[[str], bool]) -> list[int]:
    return [i for i, paths in enumerate(names) if any(fits(path) for path in paths)]
