# SPDX-License-Identifier: Apache-2.0
"""``classes.txt``: the names of classes, a line each, in one format for all sources.

A line is ``name``, ``value name`` or ``R G B name``; the first line says which, for all. Of
exclusive masks, what is called ``ignore`` is no class: pixels of it count nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from keymix.data.kinds import BACKGROUND, IGNORE
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

    def without_ignored(self) -> ClassNames:
        """Take what is called ``ignore`` out of the classes of exclusive masks."""
        if IGNORED not in self.names:
            return self
        at, colours = self.names.index(IGNORED), self.colours
        values = self.values or tuple(range(len(self.names)))
        r, g, b = colours[at] if colours else (0, 0, values[at])
        rest = [number for number in range(len(self.names)) if number != at]
        return ClassNames(
            tuple(self.names[number] for number in rest),
            None if colours else tuple(values[number] for number in rest),
            tuple(colours[number] for number in rest) if colours else None,
            r << 16 | g << 8 | b,
        )


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
    parts = {len(number) for number in numbers}
    return ClassNames(
        tuple(names),
        tuple(number[0] for number in numbers) if parts == {1} else None,
        tuple((r, g, b) for r, g, b in numbers) if parts == {3} else None,
    )


def check_classes(path: Path, names: Sequence[str], *, multilabel: bool) -> None:
    """Refuse names of classes between which nothing can be distinguished."""
    why = ""
    if multilabel and BACKGROUND in names:
        why = f"{BACKGROUND!r} is no class where each class has its own masks"
    elif not multilabel and len(names) < 2:
        why = "it has one class only; at least 2 are needed to distinguish"
    elif len(names) > IGNORE:
        why = f"it has {len(names)} classes; {IGNORE} are the most, as {IGNORE} is ignored"
    if why:
        raise UserError(f"{path}: {why}. Correct it.")
