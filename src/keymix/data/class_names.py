# SPDX-License-Identifier: Apache-2.0
"""``classes.txt``: the names of classes, a line each, in one format for all sources.

A line is ``name``, ``value name`` or ``R G B name``; the first line says which, for all. What is
called ``ignore`` is no class: pixels of it count nowhere.
"""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from keymix.errors import UserError

IGNORED = "ignore"
"""Name of what is no class."""
_FORMS = (
    (re.compile(r"(\d+)\s+(\d+)\s+(\d+)\s+(\S.*)"), "R G B name"),
    (re.compile(r"(\d+)\s+(\S.*)"), "value name"),
    (re.compile(r"(\S.*)"), "name"),
)


class ClassNames(NamedTuple):
    """What a file of classes says, a class each in its order; numbers where it has them.

    `ignored` is the value of what is ignored, or its colour as 0xRRGGBB.
    """

    names: tuple[str, ...]
    values: tuple[int, ...] | None
    colours: tuple[tuple[int, int, int], ...] | None
    ignored: int | None = None


def read_class_names(path: Path) -> ClassNames:
    """Read ``classes.txt``; no name, value or colour may stand there twice."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing. Write the names of the classes, a line each."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {why}. Restore it.") from error
    lines = [line.strip() for line in text.rstrip().splitlines()] or [""]
    pattern, form = next((each for each in _FORMS if each[0].fullmatch(lines[0])), _FORMS[-1])
    names, numbers = [], []
    for line, content in enumerate(lines, 1):
        found = pattern.fullmatch(content)
        if found is None:
            raise UserError(f"{path}: line {line} is {content!r}, not '{form}'. Correct it.")
        *before, name = found.groups()
        number = tuple(map(int, before))
        if name in names or (number and number in numbers):
            raise UserError(f"{path}: line {line}: {content!r} stands there twice. Correct it.")
        if len(number) == 3 and max(number) > 255:
            raise UserError(f"{path}: line {line}: a colour is 0 to 255 each. Correct {content!r}.")
        names.append(name)
        numbers.append(number)
    ignored = None
    if IGNORED in names:
        if not numbers[0]:  # values are positions
            numbers = [(place,) for place in range(len(names))]
        at = names.index(IGNORED)
        names.pop(at)
        ignored = reduce(lambda code, part: code << 8 | part, numbers.pop(at))
    parts = {len(number) for number in numbers}
    return ClassNames(
        tuple(names),
        tuple(number[0] for number in numbers) if parts == {1} else None,
        tuple((r, g, b) for r, g, b in numbers) if parts == {3} else None,
        ignored,
    )
