# SPDX-License-Identifier: Apache-2.0
"""How tables and sentences fit a terminal: no name and no number is cut.

Words wrap between words. Where a table is too wide, columns give way by importance and are named
below it, and a name too long for its column has a line of its own above its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

GAP = 2
"""Blanks between columns."""
READABLE = 24
"""Cells of words are not made narrower than this, as long as another column can give way."""
NAMES = (12, 8)
"""How narrow the column of names becomes where nothing else gives way."""


@dataclass(frozen=True)
class TextColumn:
    """A column as text: its heading, its cells, and how it behaves where there is little room.

    Columns with the largest `gives_way` are left out first; those with 0 last, from the right.
    """

    heading: str
    cells: Sequence[str]
    words: bool
    gives_way: int = 0

    @property
    def least(self) -> int:
        """Its width at the narrowest: numbers whole, words readable."""
        most = max((cell_len(cell) for cell in self.cells), default=0)
        if self.words:
            longest = max((_longest_word(cell) for cell in self.cells), default=0)
            most = max(longest, min(most, READABLE))
        return max(most, _longest_word(self.heading))

    @property
    def natural(self) -> int:
        """Its width with its heading and every cell on one line."""
        return max(map(cell_len, (self.heading, *self.cells)))


def cell_len(text: str) -> int:
    """Count the places of a terminal that a text takes."""
    from rich.cells import cell_len as length

    return length(text)


def wrapped(text: str, width: int, *, hang: str = "") -> list[str]:
    """Break a text between words; a word wider than the terminal stays whole.

    Lines after the first begin with `hang`.
    """
    lines, line = list[str](), ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if line and cell_len(longer) > width:
            lines.append(line)
            longer = hang + word
        line = longer
    return [*lines, line]


def drawn(title: str, columns: Sequence[TextColumn], width: int) -> Text:
    """Draw a table for a terminal of a width; the first column has names."""
    from rich.text import Text

    shown, names = _fitting(columns, width)
    widths = [names, *_widths(shown[1:], width - names)]
    made = Text()
    for line in wrapped(title, width) if title else ():
        made.append(f"{line}\n", "italic")
    heads = [wrapped(column.heading, each) for column, each in zip(shown, widths, strict=True)]
    for line in _lines(heads, shown, widths, bottom=True):
        made.append(f"{line}\n", "bold")
    made.append("─" * (sum(widths) + GAP * (len(widths) - 1)) + "\n", "dim")
    for cells in zip(*(column.cells for column in shown), strict=True):
        name, rest = cells[0], cells[1:]
        if cell_len(name) > names:
            made.append("\n".join(wrapped(name, width, hang="  ")) + "\n")
            name = ""
        blocks = [[name]] + [
            wrapped(cell, each) if column.words else [cell]
            for cell, column, each in zip(rest, shown[1:], widths[1:], strict=True)
        ]
        for line in _lines(blocks, shown, widths):
            made.append(f"{line}\n")
    left_out = [column.heading for column in columns if column not in shown]
    if left_out:
        text = f"not shown at {width} columns: {' · '.join(left_out)}"
        made.append("\n".join(wrapped(text, width)) + "\n", "dim")
    made.right_crop(1)
    return made


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split(" ")))


def _fitting(columns: Sequence[TextColumn], width: int) -> tuple[list[TextColumn], int]:
    """Choose the columns that are shown, and the width of the names."""
    first, rest = columns[0], list(columns[1:])
    natural = max(map(cell_len, (first.heading, *first.cells)))
    room = width - sum(GAP + column.least for column in rest)
    if natural <= room or not rest:
        return [first, *rest], natural
    for most in (max(NAMES[0], min(32, width // 4)), *NAMES):
        names = max(min(natural, most), cell_len(first.heading))
        while sum(GAP + column.least for column in rest) > width - names:
            last = max(rest, key=lambda column: (column.gives_way, rest.index(column)))
            if not last.gives_way:
                break
            rest.remove(last)
        else:
            return [first, *rest], _filled(names, first, rest, width)
    while len(rest) > 1 and sum(GAP + column.least for column in rest) > width - names:
        rest.pop()
    return [first, *rest], names


def _filled(names: int, first: TextColumn, rest: Sequence[TextColumn], width: int) -> int:
    """Widen the column of names to the longest that room is left for."""
    room = width - sum(GAP + column.least for column in rest)
    fitting = [length for cell in first.cells if (length := cell_len(cell)) <= room]
    return max(names, *fitting) if fitting else names


def _widths(columns: Sequence[TextColumn], room: int) -> list[int]:
    """Share out the room: all take what they need, then the narrowest grow first."""
    widths = [column.least for column in columns]
    spare = room - sum(GAP + each for each in widths)
    growing = [i for i, column in enumerate(columns) if widths[i] < column.natural]
    while spare > 0 and growing:
        narrowest = min(growing, key=lambda i: widths[i])
        widths[narrowest] += 1
        spare -= 1
        growing = [i for i in growing if widths[i] < columns[i].natural]
    return widths


def _lines(
    blocks: Sequence[list[str]],
    columns: Sequence[TextColumn],
    widths: Sequence[int],
    *,
    bottom: bool = False,
) -> Iterator[str]:
    """Join cells of several lines into lines; numbers on the right of their column."""
    height = max(map(len, blocks))
    full = [
        [""] * (height - len(block)) + block if bottom else block + [""] * (height - len(block))
        for block in blocks
    ]
    for row in zip(*full, strict=True):
        cells = []
        for text, column, width in zip(row, columns, widths, strict=True):
            blank = " " * (width - cell_len(text))
            cells.append(text + blank if column.words else blank + text)
        yield (" " * GAP).join(cells).rstrip()
