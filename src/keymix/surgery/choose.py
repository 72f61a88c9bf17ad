# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are meant: numbers, ranges such as ``6-11``, patterns on paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from keymix.errors import UserError, unknown
from keymix.hosts.layers import Layer

Layers = str | int | Sequence[str | int] | None
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def choose(found: Sequence[Layer], layers: Layers) -> list[Layer]:
    """Return the layers meant, in the model's order.

    Args:
        found: All layers of the model.
        layers: None for all; a number (0 is the first, -1 the last); text with commas between
            numbers, ranges ``"6-11"`` (both ends count) and shell-style patterns on module paths
            (``"blocks.[0-5].attn"``); or a sequence of these.

    Raises:
        UserError: If one of them matches nothing; it names the nearest paths.
    """
    if not found:
        raise UserError("this model has no layer where a mixer could sit")
    if layers is None:
        return list(found)
    given = list(layers) if isinstance(layers, list | tuple) else [layers]
    if not given:
        raise UserError("layers=[] names no layer; leave it out for all")
    wanted: set[int] = set()
    for each in given:
        wanted |= _numbers(found, each)
    return [layer for i, layer in enumerate(found) if i in wanted]


def _numbers(found: Sequence[Layer], given: object) -> set[int]:
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        return {i for part in parts for i in _of_text(found, part)}
    if isinstance(given, bool) or not isinstance(given, int):
        raise UserError(
            f"layers={given!r} must be a number, a range such as '6-11' or a pattern on paths"
        )
    if not -len(found) <= given < len(found):
        raise _outside(found, str(given))
    return {given % len(found)}


def _of_text(found: Sequence[Layer], text: str) -> Iterable[int]:
    numbers = _RANGE.fullmatch(text)
    if numbers is None:
        paths = [layer.place.path for layer in found]
        hits = [
            i
            for i, layer in enumerate(found)
            if fnmatchcase(layer.place.path, text) or fnmatchcase(layer.path, text)
        ]
        if not hits:
            raise unknown("layer", text, paths, listed=False)
        return hits
    first = int(numbers[1])
    last = int(numbers[2] or first)
    if last >= len(found):
        raise _outside(found, text)
    if last < first:
        raise UserError(f"layers={text!r} runs backwards; write '{last}-{first}'")
    return range(first, last + 1)


def _outside(found: Sequence[Layer], text: str) -> UserError:
    return UserError(
        f"layers={text!r}: this model has {len(found)} layers with attention, 0 "
        f"({found[0].place.path}) to {len(found) - 1} ({found[-1].place.path})"
    )
