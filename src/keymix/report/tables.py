# SPDX-License-Identifier: Apache-2.0
"""One table for terminal, pipe, page, CSV, Markdown and LaTeX: values as they are, columns say how.

    columns = (
        Column("mixer", "mixer", "name"),
        Column("latency, ms", "latency_ms", "ms"),
        Column("change", "change", write=formats.points),
        Column("", "seed", where="csv"),
    )
    table = Table("latency", "Latency of one image", columns, [("softmax", 1.25, None, 0)])

A command prints it with ``console.show(table)``. A template that imports ``macros.html.j2`` as
``m`` draws it with ``{{ m.sheet(table) }}``. `Table.csv`, `Table.markdown` and `Table.latex` are
text, and `Table.piped` has the cells of lines for a script. `text_table` takes cells that are text
already. A `Cell` is a value with a text of its own. No torch; rich is loaded when a table is drawn
for a terminal.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from keymix.errors import one_line
from keymix.report import formats

if TYPE_CHECKING:
    from rich.console import Group

Kind = Literal[
    "text", "name", "whole", "ratio", "ms", "mib", "rate", "per_s", "percent", "count", "energy"
]
"""What values are: text, the name of a mixer or model, or a number in some unit."""

Style = Literal["", "soft", "state", "words", "strip"]

READABLE, NARROW = 20, 8
"""Places of a terminal that a column of text has: as long as columns give way, and else."""
GAP = 2
"""Blanks between columns at a terminal, the grid's padding and its line."""

FORMULA = ("=", "+", "-", "@")
"""First characters that make a spreadsheet compute a cell."""

_FORMS: Mapping[Kind, Callable[[Any], str]] = {
    "whole": "{:,}".format,
    "ratio": formats.ratio,
    "ms": formats.three_digits,
    "mib": formats.mib,
    "rate": "{:.4f}".format,
    "per_s": "{:,.0f}".format,
    "percent": formats.percent,
    "count": formats.count,
    "energy": formats.energy,
}
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"}


@dataclass(frozen=True)
class Cell:
    """A value with a text of its own, which may be markup, such as a mean with its spread."""

    value: Any
    text: str
    style: Style = ""


@dataclass(frozen=True)
class Column:
    """A column: its heading for people, its name in files, and what its values are.

    `where` says that only files or only people have it, `write` how it writes values if not as its
    kind does. On pages, `label` is before a cell where room is short (the heading, if empty),
    `sort` says whether readers may sort by it (as its kind does), `most_first` that the largest
    then comes first, and `style` how its cells look: grey, or as states in words. At a narrow
    terminal columns with the largest `gives_way` are left out first; those with 0 last.
    """

    heading: str
    key: str
    kind: Kind = "text"
    where: Literal["csv", "people", "both"] = "both"
    write: Callable[[Any], str] | None = None
    label: str = ""
    sort: Literal["text", "number", "none", "kind"] = "kind"
    most_first: bool = False
    style: Style = ""
    gives_way: int = 0

    @property
    def is_text(self) -> bool:
        """Whether it holds text, which is left-aligned."""
        return self.kind in ("text", "name")

    @property
    def sorted_as(self) -> str:
        """How the page sorts by it: ``text``, ``number`` or not at all, ``none``."""
        return ("text" if self.is_text else "number") if self.sort == "kind" else self.sort

    def classes(self, value: Any) -> str:
        """Name the classes of a cell on the page; one that says nothing is left off a phone."""
        style = (isinstance(value, Cell) and value.style) or self.style
        if style == "soft" and self.cell(value) == formats.MISSING:
            return "soft wide"
        return style or ("words" if self.is_text else "")

    def cell(self, value: Any) -> str:
        """Write a value for people; text stays as it is in a column of numbers, too."""
        if isinstance(value, Cell):
            return value.text
        if value is None or value == "":
            return formats.MISSING
        if isinstance(value, str):
            return value
        return (self.write or _FORMS.get(self.kind, str))(value)


@dataclass(frozen=True)
class Table:
    """A table with its values as they are, one for each column; None where there is none.

    Its `key` names it in files and pipes. People see it if it is `shown`, it becomes a CSV file if
    it is `saved`, `marked` rows are highlighted on the page, and `note` stands above it there.
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    shown: bool = True
    saved: bool = True
    marked: frozenset[int] = frozenset()
    note: str = ""

    def head(self, rows: int) -> Table:
        """Return its first rows, and how many more there are in the title."""
        more = len(self.rows) - rows
        if more <= 0:
            return self
        return replace(self, title=f"{self.title} ({more} more rows)", rows=self.rows[:rows])

    def seen(self) -> list[int]:
        """Return the positions of the columns that people see."""
        return [i for i, column in enumerate(self.columns) if column.where != "csv"]

    def headings(self) -> list[str]:
        """Return what people read above the columns."""
        return [self.columns[i].heading for i in self.seen()]

    def cells(self) -> list[list[str]]:
        """Return the rows as people read them."""
        return [[self.columns[i].cell(row[i]) for i in self.seen()] for row in self.rows]

    def sheet(self) -> list[list[tuple[Column, Any, str, str]]]:
        """Return of every cell that people see its column, value, text and classes on the page."""
        return [
            [
                (
                    self.columns[i],
                    plain_value(row[i]),
                    self.columns[i].cell(row[i]),
                    self.columns[i].classes(row[i]),
                )
                for i in self.seen()
            ]
            for row in self.rows
        ]

    @property
    def sortable(self) -> bool:
        """Whether readers of the page may sort it."""
        return any(self.columns[i].sorted_as != "none" for i in self.seen())

    def plain(self) -> list[list[Any]]:
        """Return the names of the columns and then the values as they are, for files."""
        kept = [i for i, column in enumerate(self.columns) if column.where != "people"]
        rows = ([plain_value(row[i]) for i in kept] for row in self.rows)
        return [[self.columns[i].key for i in kept], *rows]

    def piped(self) -> list[list[str]]:
        """Return the same as text of six digits, on one line each, for scripts."""
        return [[_piped(value) for value in row] for row in self.plain()]

    def csv(self) -> str:
        """Write the table as CSV."""
        header, *rows = self.plain()
        return csv_text(header, rows)

    def markdown(self) -> str:
        """Write the table as Markdown, numbers to the right."""
        rule = ["---" if self.columns[i].is_text else "--:" for i in self.seen()]
        lines = [self.headings(), rule, *self.cells()]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"

    def latex(self) -> str:
        """Write the table for LaTeX, with the rules of the package booktabs."""
        sides = "".join("l" if self.columns[i].is_text else "r" for i in self.seen())
        head, *body = (
            " & ".join("".join(_LATEX.get(mark, mark) for mark in cell) for cell in line) + r" \\"
            for line in (self.headings(), *self.cells())
        )
        begin, end = f"\\begin{{tabular}}{{{sides}}}\n\\toprule", "\\bottomrule\n\\end{tabular}"
        return "\n".join([begin, head, r"\midrule", *body, end]) + "\n"

    def drawn(self, width: int) -> Group:
        """Draw the table for a terminal of a width: names fold, and no number is cut.

        Where the columns are too wide, some give way by importance and are named below.
        """
        from rich import box
        from rich.cells import cell_len
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        columns, rows = [self.columns[i] for i in self.seen()], self.cells()
        widest, least = [], []
        for i, column in enumerate(columns):
            cells = [row[i] for row in rows]
            words = [*column.heading.split(" "), *(each for cell in cells for each in cell.split())]
            widest.append(max(map(cell_len, cells), default=0))
            longest = max(map(cell_len, words if i else column.heading.split(" ")))
            least.append(longest if column.is_text else max(widest[i], longest))
        shown = list(range(len(columns)))
        while len(shown) > 2:
            last = max(shown[1:], key=lambda i: (columns[i].gives_way, i))
            readable = READABLE if columns[last].gives_way else NARROW
            needed = (max(least[i], min(widest[i], readable)) for i in shown)
            if sum(needed) + GAP * (len(shown) - 1) <= width:
                break
            shown.remove(last)
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i in shown:
            fixed = i > 0 and (widest[i] <= READABLE or not columns[i].is_text)
            grid.add_column(
                Text(one_line(columns[i].heading)),
                overflow="fold",
                justify="left" if columns[i].is_text else "right",
                width=max(least[i], widest[i]) if fixed else None,
            )
        for row in rows:
            grid.add_row(*(Text(one_line(row[i])) for i in shown))
        left_out = [column.heading for i, column in enumerate(columns) if i not in shown]
        above, below = self.title, f"not shown at {width} columns: {' · '.join(left_out)}"
        return Group(
            *([Text(one_line(above), "italic")] if above else []),
            grid,
            *([Text(one_line(below), "dim")] if left_out else []),
        )

    def text(self, width: int) -> str:
        """Draw the table as plain text of a width."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width)
        with console.capture() as drawn:
            console.print(self.drawn(width))
        return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: int = 1
) -> Table:
    """Make a table of cells that are text already; the first `left` columns are left-aligned."""
    columns = [
        Column(heading, heading, "text" if i < left else "count")
        for i, heading in enumerate(headings)
    ]
    return Table("", title, columns, [[Cell(cell, cell) for cell in row] for row in rows])


def plain_value(value: Any) -> Any:
    """Return the value of a cell as files hold it."""
    return value.value if isinstance(value, Cell) else value


def _piped(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value))


def safe(value: Any) -> Any:
    """Escape control characters of text, and let none begin as what a spreadsheet computes."""
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write names of columns and rows as CSV with one line per row; None is an empty cell."""
    stream = io.StringIO()
    lines = ([safe(value) for value in row] for row in (header, *rows))
    csv.writer(stream, lineterminator="\n").writerows(lines)
    return stream.getvalue()
